"""In which form planes are stored, as settings and as codecs, and the way from one to another.

The settings are those of `StreamConfig`. A form is read off a plane's codec, and a codec follows
from a form and from what the optimizer itself keeps: `StorageForm.planes` says for the planes of a
space what `plan_engine` would choose for a run with these settings, by the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gds_optimizer.codecs import RemainderCodec, get_codec, nearest_codec
from gds_optimizer.config import MOMENT_DTYPE_CHOICES, MOMENT_ROUNDING_CHOICES
from gds_optimizer.errors import ConfigError, UnsupportedError
from gds_optimizer.layout import PlaneSpec
from gds_optimizer.plan import MAIN_PLANE, moment_codec, remainder_name

_ENCODED_FP32 = "fp32:"
_STOCHASTIC = "-sr"
_MAIN_CHOICES = ("fp32", "remainder")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageForm:
    """How planes are to be stored; what is None stays as it is.

    Attributes:
        moment_dtype: "fp32", "bf16" or "int8".
        moment_rounding: "nearest" or "stochastic". None for moments that are in fp32 and go into
            another form is "stochastic", the default of `StreamConfig`.
        main: "fp32" or "remainder".

    Raises:
        ConfigError: a value is none of these.
    """

    moment_dtype: str | None = None
    moment_rounding: str | None = None
    main: str | None = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("moment_dtype", MOMENT_DTYPE_CHOICES),
            ("moment_rounding", MOMENT_ROUNDING_CHOICES),
            ("main", _MAIN_CHOICES),
        ):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ConfigError(f"{name} is {value!r}, wanted one of {', '.join(choices)}")

    def planes(self, planes: Sequence[PlaneSpec], kind: str) -> tuple[PlaneSpec, ...]:
        """The planes of a space, with the codecs that store them in this form.

        Args:
            planes: as they are stored now; the main plane, if there is one, is the first.
            kind: the optimizer's class, for messages.

        Raises:
            UnsupportedError: nothing is known about a plane's codec, or the form has none for
                such a plane.
        """
        for plane in planes:
            _check_known(plane)
        has_main = planes[0].name == MAIN_PLANE
        moments = [
            replace(
                plane,
                codec=moment_codec(
                    replace(plane, codec=_kept_codec(plane)),
                    self.moment_dtype or _moment_dtype(plane),
                    self.moment_rounding or _moment_rounding(plane),
                    kind,
                ),
            )
            for plane in planes[has_main:]
        ]
        if not has_main:
            return tuple(moments)
        # Where the tie bits of remainders are follows from how the moments are stored.
        form = self.main or ("fp32" if get_codec(planes[0].codec).is_view else "remainder")
        codec = remainder_name(moments) if form == "remainder" else "fp32"
        return (replace(planes[0], codec=codec), *moments)

    def describe(self) -> str:
        """What it asks for, in words."""
        asked = [f"moment_dtype {self.moment_dtype}"] if self.moment_dtype else []
        asked += [f"moment_rounding {self.moment_rounding}"] if self.moment_rounding else []
        asked += [f"main {self.main}"] if self.main else []
        return ", ".join(asked)


def _check_known(plane: PlaneSpec) -> None:
    """UnsupportedError for a codec that nothing is known about, or that is not for such a plane."""
    try:
        codec = get_codec(plane.codec)
    except KeyError:
        codec = None
    if plane.name == MAIN_PLANE:
        is_known = plane.codec == "fp32" or isinstance(codec, RemainderCodec)
    else:
        is_known = codec is not None and (codec.is_view or plane.codec.startswith(_ENCODED_FP32))
    if not is_known:
        raise UnsupportedError(
            f"plane {plane.name!r} is stored by the codec {plane.codec!r}, which cannot be "
            "converted: convert main parameters that are stored in fp32 or as remainders, and "
            "other planes that are in fp32, bf16 or int8, or restore the snapshot into a run with "
            "the settings that it was taken with"
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
