"""Models learned with scikit-learn or torch, as a library: the core imports neither, and many processes may learn."""
