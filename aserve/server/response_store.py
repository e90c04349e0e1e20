"""What is remembered of finished responses, and for how long: bounded in number and bytes, the oldest goes first."""

from collections import OrderedDict
from dataclasses import dataclass

from aserve.errors import NotFound
from aserve.server.responses import Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """json: the response object, empty where only the conversation is kept. owner: whoever may see it."""

    owner: str
    conversation: Conversation
    json: bytes = b""

    @property
    def num_bytes(self) -> int:
        return len(self.json) + self.conversation.num_bytes


class ResponseMemory:
    """Finished responses by id. One serves ``store`` for the whole server, and each websocket has one of its own."""

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Keep it, as long as there is room; one that is larger than all the room is not kept."""
        self._responses[response_id] = response
        self._num_bytes += response.num_bytes
        while len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes:
            _, oldest = self._responses.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """None for another key's response too."""
        response = self._responses.get(response_id)
        return response if response is not None and response.owner == owner else None

    def remove(self, response_id: str, owner: str) -> None:
        """Raises NotFound."""
        if self.find(response_id, owner) is None:
            raise not_found()
        self._num_bytes -= self._responses.pop(response_id).num_bytes


def not_found() -> NotFound:
    return NotFound("No response of yours has this id.", param="response_id", code="response_not_found")
