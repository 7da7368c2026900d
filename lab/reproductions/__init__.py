"""Programs that remake the tables of ``lab/results`` and the bundled data; nothing in the product imports them.

Each is run from the root of a checkout: ``python -m lab.reproductions.asrpt PAGE RESULTS``. ``PAGE`` is a page whose
tables stand between ``<!-- NAME -->`` and ``<!-- end -->`` (``marked``); its docstring says what else a program needs.

=================== ====================================================================================
``asrpt``           A-SRPT against its paper, from finished experiments
``iteration_times`` iteration times and placement against measured profiles (A-SRPT)
``powerflow``       the performance models against measurements (PowerFlow, section 3)
``powerflow_day``   a day of jobs and its sensitivity (PowerFlow), compared at ``equal_energy``
``powerflow_fitted`` fitted against profiled models (PowerFlow, Fig. 9)
``powerflow_traces`` the traces of PowerFlow's sensitivity analysis
``freesh_day``      a day of pools (FREESH)
``traffic``         forecasts of traffic for pools
``carbon_report``   forecasts of carbon intensity
``make_traces``     the traces in ``services/simulator/bundles`` and ``lab/bundles``
``make_profiles``   the measured tables there
=================== ====================================================================================
"""
