"""What all processes share: settings, logging, the HTTP app, problems, clients, Redis."""
