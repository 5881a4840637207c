"""Flower's grid inside one process: messages go straight to the ClientApps, and everything can go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

SERVER = 1
NODE_UNAVAILABLE = 5

Fault = Callable[[str, Message, Message], Message | None]
"""(site, message, reply) → the reply that arrives, None if none does in time."""


class FakeGrid(Grid):
    """Nodes by name, each with its ClientApp; `offline` ones are not there, `fault` meddles with replies."""

    def __init__(self, app: ClientApp, nodes: dict[str, dict[str, Any]], registered: bool = True) -> None:
        self.app, self.nodes, self.registered = app, nodes, registered
        self.ids = {name: 1000 + 7 * place for place, name in enumerate(nodes)}
        self.offline: set[str] = set()
        self.fault: Fault = lambda site, message, reply: reply
        self.sent: list[tuple[str, Message]] = []
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SERVER

    def get_nodes(self) -> Iterable[NodeInfo]:
        online = [name for name in self.ids if name not in self.offline]
        return [NodeInfo(node_id=self.ids[name], name=name if self.registered else "") for name in online]

    def get_node_ids(self) -> Iterable[int]:
        return [node.node_id for node in self.get_nodes()]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        replies = []
        # Arrival in any order but that of the cohort.
        for message in reversed(list(messages)):
            message.metadata.__dict__["_message_id"] = message.object_id
            (site,) = [name for name, node in self.ids.items() if node == message.metadata.dst_node_id]
            self.sent.append((site, message))
            reply = self.fault(site, message, self.call(site, message))
            if reply is not None:
                replies.append(reply)
        return replies

    def call(self, site: str, message: Message) -> Message:
        TaskIdentity.node_id = self.ids[site]
        try:
            return self.app(message, Context(1, self.ids[site], self.nodes[site], RecordDict(), {}))
        except Exception as error:
            return Message(Error(2, repr(error)), reply_to=message)
        finally:
            TaskIdentity.node_id = SERVER

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError
