"""What has to be closed is a context manager that does."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Closed at the end of a `with` block, however that ends."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Idempotent, bounded in time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
