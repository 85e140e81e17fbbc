"""In which form planes are stored, as settings and as codecs, and the way from one to another.

The settings are those of `StreamConfig`. A form is read off a plane's codec, and a codec follows
from a form and from what the optimizer itself keeps: `StorageForm.codec` says for one plane what
`plan_engine` would choose for a run with these settings, by the same function.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gds_optimizer.codecs import get_codec, nearest_codec
from gds_optimizer.config import MOMENT_DTYPE_CHOICES, MOMENT_ROUNDING_CHOICES
from gds_optimizer.errors import ConfigError, UnsupportedError
from gds_optimizer.layout import PlaneSpec
from gds_optimizer.plan import MAIN_PLANE, moment_codec

_ENCODED_FP32 = "fp32:"
_STOCHASTIC = "-sr"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageForm:
    """How planes are to be stored; what is None stays as it is.

    Attributes:
        moment_dtype: "fp32", "bf16" or "int8".
        moment_rounding: "nearest" or "stochastic". None for moments that are in fp32 and go into
            another form is "stochastic", the default of `StreamConfig`.

    Raises:
        ConfigError: a value is none of these.
    """

    moment_dtype: str | None = None
    moment_rounding: str | None = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("moment_dtype", MOMENT_DTYPE_CHOICES),
            ("moment_rounding", MOMENT_ROUNDING_CHOICES),
        ):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ConfigError(f"{name} is {value!r}, wanted one of {', '.join(choices)}")

    def codec(self, plane: PlaneSpec, kind: str) -> str:
        """Name of the codec that stores a plane in this form.

        Args:
            plane: as it is stored now.
            kind: the optimizer's class, for messages.

        Raises:
            UnsupportedError: nothing is known about the plane's codec, or the form has none for
                such a plane.
        """
        _check_known(plane)
        if plane.name == MAIN_PLANE:
            return plane.codec
        return moment_codec(
            replace(plane, codec=_kept_codec(plane)),
            self.moment_dtype or _moment_dtype(plane),
            self.moment_rounding or _moment_rounding(plane),
            kind,
        )

    def describe(self) -> str:
        """What it asks for, in words."""
        asked = [f"moment_dtype {self.moment_dtype}"] if self.moment_dtype else []
        asked += [f"moment_rounding {self.moment_rounding}"] if self.moment_rounding else []
        return ", ".join(asked)


def _check_known(plane: PlaneSpec) -> None:
    """UnsupportedError for a codec that cannot be decoded from the plane's bytes alone."""
    is_moment = plane.name != MAIN_PLANE
    try:
        codec = get_codec(plane.codec)
    except KeyError:
        codec = None
    if codec is None or not (
        codec.is_view or (is_moment and plane.codec.startswith(_ENCODED_FP32))
    ):
        raise UnsupportedError(
            f"plane {plane.name!r} is stored by the codec {plane.codec!r}, which cannot be "
            "converted: convert planes that are stored in fp32, bf16 or int8, or restore the "
            "snapshot into a run with the settings that it was taken with"
        )


def _kept_codec(plane: PlaneSpec) -> str:
    """The codec of what the optimizer itself keeps: encoded planes hold its fp32."""
    return "fp32" if plane.codec.startswith(_ENCODED_FP32) else plane.codec


def _moment_dtype(plane: PlaneSpec) -> str:
    form = plane.codec.removeprefix(_ENCODED_FP32)
    return form.partition("-")[0] if plane.codec.startswith(_ENCODED_FP32) else "fp32"


def _moment_rounding(plane: PlaneSpec) -> str:
    is_nearest = plane.codec.startswith(_ENCODED_FP32) and not plane.codec.endswith(_STOCHASTIC)
    return "nearest" if is_nearest else "stochastic"


def same_bytes(first: str, second: str) -> bool:
    """Whether two codecs store the same form: what one has written is for the other to read."""
    return nearest_codec(first).name == nearest_codec(second).name
