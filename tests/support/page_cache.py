"""How much of a file the kernel keeps in its page cache."""

from __future__ import annotations

from gds_optimizer.bench.page_cache import resident_pages

__all__ = ["resident_pages"]
