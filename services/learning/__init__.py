"""Models learned with scikit-learn, as a library: the core must not import it, and more than one process may learn."""
