"""What a hostile job or host tries: it listens, floods or holds, and each try is held to a figure or a promise."""
