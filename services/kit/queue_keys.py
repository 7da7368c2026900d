"""Where Celery keeps messages in Redis."""

KEY_PREFIX = "wattshift:celery:"

UNSETTLED = KEY_PREFIX + "unacked"  #: The hash of the messages, of all queues, that a worker has taken and not settled


def queue_key(queue: str) -> str:
    """Return the Redis list in which the messages of ``queue`` wait."""
    return KEY_PREFIX + queue
