"""Commands that set up the box and the server. The daemon never loads this package."""


class Refused(Exception):
    """Nothing was changed; the text says why, and what would be right."""


class Failed(Exception):
    """Something failed half-way; the text says what is left, and what to do."""
