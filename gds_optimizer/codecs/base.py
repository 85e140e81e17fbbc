"""The line between tensors and bytes: a codec turns a plane's values into a fixed number of bytes.

Everything below a codec (slots, files, I/O) sees bytes; everything above it sees tensors. A codec
works in the caller's buffers and declares its encoded size beforehand, so that a bucket's file is
laid out before the first byte exists. The same values give the same bytes on every device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

# Elements that plain torch operations handle at a time: an int32 temporary of them is 512 KiB, and
# no codec holds more than eight at once.
CHUNK_NUMEL = 2**17


class Codec(ABC):
    """Fixed-size encoding of one plane.

    Attributes:
        name: what layouts and footers record.
        dtype: dtype of the decoded values.
        is_view: whether `decode` returns a view of the bytes, so that nothing need be encoded.
        is_converted: whether values are converted from and to the plane's bytes alone, in another
            buffer. Neither this nor a view is what needs more than those bytes (`RemainderCodec`).
        is_lossless: whether every bit of every value comes back.
        rounds_stochastically: whether `encode_from` makes use of its seed.
        range_numel: a part of a plane starts and ends at multiples of it, or at the plane's end.
        workspace_itemsize: bytes an element of what decoding and encoding need beside the values.
    """

    name: str
    dtype: torch.dtype
    is_view: bool = False
    is_converted: bool = False
    is_lossless: bool = False
    rounds_stochastically: bool = False
    range_numel: int = 1
    workspace_itemsize: int = 0

    @abstractmethod
    def encoded_bytes(self, numel: int) -> int:
        """Bytes that `numel` values take when encoded, before page alignment."""

    @abstractmethod
    def decode(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        """Values of an encoded plane.

        Args:
            encoded: 1-D uint8 tensor, at least `encoded_bytes(numel)` long, 4 KiB-aligned.
            numel: number of values.

        Returns:
            1-D tensor of `dtype` and `numel` elements. It may be a view of `encoded`.
        """

    @abstractmethod
    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Write `values` (1-D, `dtype`) into `encoded` (1-D uint8); a no-op for a view of it."""

    @abstractmethod
    def decode_into(
        self,
        encoded: torch.Tensor,
        values: torch.Tensor,
        *,
        numel: int | None = None,
        start: int = 0,
    ) -> None:
        """Decode a plane, or a part of one, into the caller's tensor.

        Args:
            encoded: the whole encoded plane, 1-D uint8, 4 KiB-aligned.
            values: 1-D contiguous tensor of `dtype` that receives elements `start` to
                `start + values.numel()`.
            numel: elements of the whole plane; by default the part is all of it.
            start: first element of the part.

        Raises:
            ValueError: dtype, shape, size or place of a tensor is none that the codec can handle.
        """

    @abstractmethod
    def encode_from(
        self,
        values: torch.Tensor,
        encoded: torch.Tensor,
        *,
        numel: int | None = None,
        start: int = 0,
        seed: int = 0,
    ) -> None:
        """Encode a plane, or a part of one, from the caller's tensor, which stays as it is.

        The bytes do not depend on how a plane is cut into parts.

        Args:
            values, encoded, numel, start: as for `decode_into`.
            seed: of stochastic rounding, see `rounding_seed`; others ignore it.

        Raises:
            ValueError: as for `decode_into`.
        """

    def check_part(
        self, encoded: torch.Tensor, values: torch.Tensor, numel: int | None, start: int
    ) -> int:
        """The number of elements of the plane, after making sure that a part can be handled.

        Raises:
            ValueError: as for `decode_into`.
        """
        numel = start + values.numel() if numel is None else numel
        check_flat(self.name, "values", values, self.dtype)
        check_flat(self.name, "encoded plane", encoded, torch.uint8)
        if encoded.device != values.device:
            raise ValueError(
                f"codec {self.name}: the encoded plane is on {encoded.device} and the values are "
                f"on {values.device}, wanted one device"
            )
        if encoded.numel() < self.encoded_bytes(numel):
            raise ValueError(
                f"codec {self.name}: {numel} elements take {self.encoded_bytes(numel)} bytes, got "
                f"an encoded plane of {encoded.numel()}"
            )
        end, unit = start + values.numel(), self.range_numel
        if start < 0 or end > numel or start % unit or (end % unit and end != numel):
            raise ValueError(
                f"codec {self.name}: cannot handle elements {start} to {end} of {numel}, wanted a "
                f"part of the plane between multiples of {unit} (or up to its end)"
            )
        return numel


class EncodedCodec(Codec):
    """A codec of fp32 values that has to convert them: its decoded values need a buffer.

    A subclass implements `_decode_part` and `_encode_part` for checked arguments.
    """

    dtype = torch.float32
    is_converted = True

    @torch.no_grad()
    def decode(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        """As the base class says; the result is newly allocated: see `decode_into`."""
        values = torch.empty(numel, dtype=self.dtype, device=encoded.device)
        self.decode_into(encoded, values)
        return values

    @torch.no_grad()
    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """As the base class says; stochastic rounding takes seed 0: see `encode_from`."""
        self.encode_from(values, encoded)

    @torch.no_grad()
    def decode_into(
        self,
        encoded: torch.Tensor,
        values: torch.Tensor,
        *,
        numel: int | None = None,
        start: int = 0,
    ) -> None:
        numel = self.check_part(encoded, values, numel, start)
        if values.numel():
            self._decode_part(encoded, values, numel, start)

    @torch.no_grad()
    def encode_from(
        self,
        values: torch.Tensor,
        encoded: torch.Tensor,
        *,
        numel: int | None = None,
        start: int = 0,
        seed: int = 0,
    ) -> None:
        numel = self.check_part(encoded, values, numel, start)
        if values.numel():
            self._encode_part(values, encoded, numel, start, seed)

    @abstractmethod
    def _decode_part(
        self, encoded: torch.Tensor, values: torch.Tensor, numel: int, start: int
    ) -> None: ...

    @abstractmethod
    def _encode_part(
        self, values: torch.Tensor, encoded: torch.Tensor, numel: int, start: int, seed: int
    ) -> None: ...


def check_flat(codec: str, what: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """ValueError unless `tensor` is 1-D, contiguous and of one of `dtypes`."""
    if tensor.dtype not in dtypes or tensor.dim() != 1 or not tensor.is_contiguous():
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(
            f"codec {codec}: {what} must be 1-D, contiguous and {wanted}, got {tensor.dtype} of "
            f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        )


def chunks(numel: int, chunk_numel: int = CHUNK_NUMEL) -> Iterator[slice]:
    """Cuts of `numel` elements that keep temporaries small."""
    for start in range(0, numel, chunk_numel):
        yield slice(start, min(start + chunk_numel, numel))


def is_nan_bits(bits: torch.Tensor) -> torch.Tensor:
    """Which fp32 bit patterns (int32) are NaN."""
    return (bits & MAGNITUDE_BITS) > INFINITY_BITS


# int32 patterns of fp32.
MAGNITUDE_BITS = 0x7FFFFFFF
INFINITY_BITS = 0x7F800000
NAN_BITS = 0x7FC00000
