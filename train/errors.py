"""The trainer's one kind of user error."""


class TrainError(ValueError):
    """Something the user can put right. One line: the thing, the value found, the value wanted, the remedy."""
