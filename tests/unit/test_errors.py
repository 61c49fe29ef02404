"""Every error can be built from one message, travels between processes, and is caught as what it is."""

from __future__ import annotations

import builtins
import pickle

import pytest
from torch._utils import ExceptionWrapper

from td_datapipes import errors

NAMES = errors.__all__


@pytest.mark.parametrize("name", NAMES)
def test_an_error_survives_pickling_and_the_loaders_wrapping(name: str) -> None:
    error = getattr(errors, name)("row 7 is gone; write it again")
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied)) == (type(error), str(error))
    # DataLoader rebuilds a worker's exception from its type and one message.
    try:
        raise error
    except errors.TDDatapipesError:
        wrapped = ExceptionWrapper(where="in worker 0")
    with pytest.raises(type(error), match="row 7 is gone; write it again"):
        wrapped.reraise()


@pytest.mark.parametrize("name", NAMES)
def test_every_error_is_caught_by_the_root_and_says_what_it_is(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.TDDatapipesError)
    assert kind.__doc__
    assert not hasattr(builtins, name), "it would hide a builtin"


def test_all_errors_are_listed() -> None:
    defined = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert defined == set(NAMES)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("AuthenticationError", PermissionError),
        ("ConfigurationError", ValueError),
        ("DatasetExistsError", FileExistsError),
        ("DatasetNotFoundError", LookupError),
        ("FieldNotFoundError", LookupError),
        ("InterruptedWriteError", errors.DatasetNotFoundError),
        ("RowIndexError", IndexError),
        ("SchemaError", ValueError),
        ("ServerFullError", errors.ServerError),
        ("ServerTimeoutError", TimeoutError),
        ("ServerUnavailableError", ConnectionError),
        ("URLError", errors.ConfigurationError),
    ],
)
def test_those_who_know_only_pythons_own_errors_can_catch_them(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), builtin)
