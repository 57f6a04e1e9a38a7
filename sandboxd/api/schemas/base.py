"""What every body and answer of the API has in common: strictness, and the words within."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from sandboxd.images.store import NAME_MAX, NAME_PATTERN

PATH_BYTES_MAX: Final = 4095
"""PATH_MAX of the kernel without its NUL."""


class Body(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not hold a NUL byte")
    return text


def _path(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("must be an absolute path")
    if len(text.encode()) > PATH_BYTES_MAX:
        raise ValueError(f"has more than {PATH_BYTES_MAX} bytes")
    return _no_nul(text)


def _variable(name: str) -> str:
    if not name or "=" in name:
        raise ValueError("a variable's name must not be empty or hold '='")
    return _no_nul(name)


Text = Annotated[str, AfterValidator(_no_nul)]
AbsolutePath = Annotated[str, AfterValidator(_path)]
Word = Annotated[str, StringConstraints(max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]
User = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=128, pattern=r"^[^\x00-\x20\x7f:/]+(:[^\x00-\x20\x7f:/]+)?$"
    ),
]
Environment = Annotated[
    dict[Annotated[str, AfterValidator(_variable)], Text], Field(max_length=1024)
]
ProfileName = Annotated[
    str, StringConstraints(max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
]
ImageName = Annotated[str, StringConstraints(max_length=NAME_MAX, pattern=f"^{NAME_PATTERN}$")]
Hostname = Annotated[
    str,
    StringConstraints(max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?$"),
]
ExecId = Annotated[
    str,
    StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"),
    Field(examples=["ex-w5t3d6c2nq4mzk7xq3v4y2a5pe"]),
]
