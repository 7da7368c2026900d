"""Requests of applications: the doors they come through, one queue for each application, and who answers.

``door`` takes requests by the Open Inference Protocol v2 (``asked``) and by plain HTTP, ``queue`` is the order in which
an application's instances serve them, and ``coordination`` lets one of several router processes assign for all
(``remote`` is how the others ask it).
"""
