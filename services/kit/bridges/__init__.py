"""What bridges to engines share: each is three parts, of which an engine's own package has the first two.

``reading`` and ``steering`` are an engine's: its jobs and nodes as it shows them, and what is to be changed in it.
``talk`` is what a bridge and the control plane tell each other, ``energy`` what is booked where nobody measures,
``figures`` what it shows at ``/metrics``, and ``process`` the process of every bridge with its settings.
"""
