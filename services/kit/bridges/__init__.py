"""What bridges to engines share. Each bridge has three parts; an engine's own package provides the first two.

``reading`` and ``steering`` are an engine's: its jobs and nodes as it shows them, and what is to be changed in it.
``talk`` is the exchange between a bridge and the control plane, ``energy`` what is booked where nobody measures,
``figures`` the metrics at ``/metrics``, and ``process`` the process of every bridge with its settings.
"""
