"""Models learned with scikit-learn, as a library: the core does not import it, and many processes may learn."""
