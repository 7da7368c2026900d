"""Policies of other papers that wait for greener hours.

``gaia`` picks each job's start when it arrives; ``ecovisor`` starts jobs below a threshold of the intensity;
``wait_awhile`` runs each job in the greenest hours of its window; ``carbon_scaler`` also makes it wide there.
"""
