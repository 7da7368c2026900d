"""Where intensities come from: one module per provider, all behind the ``Provider`` protocol."""
