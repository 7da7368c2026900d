"""Conversions between the units the outside world speaks and the ones the core computes in (J, W, s, gCO2)."""

J_PER_KWH = 3_600_000.0
S_PER_HOUR = 3_600.0
G_PER_KWH_PER_LB_PER_MWH = 0.45359237
