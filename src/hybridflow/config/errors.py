"""The one exception that a wrong setting raises."""


class ConfigError(ValueError):
    """A setting is wrong. The message is one sentence a problem: the key, the value and the remedy."""
