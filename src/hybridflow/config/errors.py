"""The exceptions whose messages are for people: what is wrong, where, and the remedy, in a sentence a problem."""


class HybridflowError(Exception):
    """Something that whoever started the run can mend; the command line shows its message without a stack."""


class ConfigError(HybridflowError, ValueError):
    """A setting is wrong. The message is one sentence a problem: the key, the value and the remedy."""
