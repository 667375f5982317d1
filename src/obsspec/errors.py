"""What a user can get wrong, told in one line."""


class InputError(Exception):
    """Bad input. The message is one line that names the file or field and the remedy; a command prints just that."""
