"""Which sites are connected: Flower's nodes by the names of their sites."""

import logging
import time
from collections.abc import Iterable, Mapping

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from flatfed.core.errors import FlatfedError, shown
from flatfed.deployment import wire
from flatfed.deployment.spec import FederationSettings

POLL = 1.0
"""Seconds between looks for nodes that are not connected yet."""

log = logging.getLogger("flwr.flatfed")


def send_and_wait(
    grid: Grid, kind: str, contents: Mapping[int, RecordDict], timeout: float
) -> tuple[dict[int, RecordDict], dict[int, Error]]:
    """What nodes answered in time, and why the others did not, by node."""
    # A node that comes back much later should not work through what is no longer waited for.
    messages = [
        Message(content, node, kind, ttl=timeout + 60.0, group_id=kind) for node, content in contents.items()
    ]
    if not messages:
        return {}, {}
    answers: dict[int, RecordDict] = {}
    failures = dict.fromkeys(contents, Error(wire.SILENT, f"no answer within {timeout:g} s"))
    replies = list(grid.send_and_receive(messages, timeout=timeout))
    # Errors that the SuperLink reports do not come from the node; only the message they answer tells which.
    recipients = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
    replied = [recipients.get(reply.metadata.reply_to_message_id) for reply in replies]
    for reply, node in zip(replies, replied, strict=True):
        if node is None:
            log.warning("a reply to a message that was never sent is ignored")
        elif replied.count(node) > 1:
            failures[node] = Error(wire.REPEATED, "it answered more than once")
        elif reply.has_error():
            code = reply.error.code
            failures[node] = Error(code, f"error {code}: {wire.plain(str(reply.error.reason or ''))}")
        else:
            answers[node] = reply.content
            failures.pop(node, None)
    return answers, failures


class Nodes:
    """The nodes of a grid, what they say about themselves, and which site each of them is."""

    def __init__(self, grid: Grid, settings: FederationSettings) -> None:
        self.grid, self.settings, self.timeout = grid, settings, settings.round_timeout
        self.descriptions: dict[int, wire.SiteDescription] = {}
        self._silent: set[int] = set()

    def online(self, describe_all: bool = False) -> dict[str, int]:
        """The nodes that are connected now, by name.

        A node's registered name counts; one that has none is asked for the name that its operator gave it. If
        several nodes go by one name, none of them takes part until only one is left; a registered name is not
        shared with nodes that only claim it.
        """
        registered = {}
        for node in self.grid.get_nodes():
            if node.name.isprintable():
                registered[node.node_id] = node.name
            elif node.node_id not in self._silent:
                self._silent.add(node.node_id)
                log.warning("node %d is called %s; it does not take part", node.node_id, shown(node.name))
        new = [node for node in registered if node not in self.descriptions and node not in self._silent]
        self._describe(new if describe_all else [node for node in new if not registered[node]])
        trusted = _unique((name, node) for node, name in registered.items() if name)
        taken = {name for name in registered.values() if name}
        claimed = _unique(
            (self.descriptions[node].name, node)
            for node, name in registered.items()
            if not name and node in self.descriptions and self.descriptions[node].name not in {"", *taken}
        )
        return trusted | claimed

    def wait(self, enough: int, among: Iterable[str]) -> dict[str, int]:
        """Those of some sites that are connected; waits for `enough` of them, but not for ever."""
        names, deadline = set(among), time.monotonic() + self.timeout
        if not names <= self.online().keys():
            # A site's answer may only have been lost. Unknown nodes are waited for only if one is missing.
            self._silent.clear()
        while True:
            online = {name: node for name, node in self.online().items() if name in names}
            if len(online) >= enough or time.monotonic() > deadline:
                return online
            time.sleep(POLL)

    def assemble(self) -> dict[str, wire.SiteDescription]:
        """All sites of a federation, sorted by name, with what they say about themselves."""
        clients, wait = self.settings.clients, self.settings.wait
        deadline = time.monotonic() + wait
        needed = clients if isinstance(clients, int) else len(set(clients))
        while True:
            self._silent.clear()
            online = self.online(describe_all=True)
            ready = {
                name: self.descriptions[online[name]]
                for name in sorted(online)
                if online[name] in self.descriptions and (isinstance(clients, int) or name in clients)
            }
            if isinstance(clients, int) and len(ready) > clients:
                raise FlatfedError(
                    f"clients = {clients}: {len(ready)} sites are connected ({', '.join(ready)}); "
                    "give their number, or the names of those that belong to the federation"
                )
            if len(ready) == needed:
                return ready
            if time.monotonic() > deadline:
                raise FlatfedError(
                    f"clients = {clients}: after {wait:g} s only {len(ready)} sites are connected "
                    f"({', '.join(ready) or 'none'}); start the others, or change clients or wait"
                )
            time.sleep(POLL)

    def _describe(self, nodes: list[int]) -> None:
        answers, failures = send_and_wait(
            self.grid, "query", {node: RecordDict() for node in nodes}, self.timeout
        )
        for node, answer in answers.items():
            try:
                description = wire.read_header(wire.SiteDescription, answer)
                most = self.settings.max_samples
                if description.samples > most:
                    raise FlatfedError(f"samples = {description.samples}: more than max_samples = {most}")
                self.descriptions[node] = description
            except FlatfedError as error:
                failures[node] = Error(wire.REFUSED, str(error))
        for node, failure in failures.items():
            log.warning("node %d does not say what it is: %s", node, wire.plain(str(failure.reason)))
            self._silent.add(node)


def _unique(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    nodes: dict[str, list[int]] = {}
    for name, node in pairs:
        nodes.setdefault(name, []).append(node)
    for name, namesakes in nodes.items():
        if len(namesakes) > 1:
            log.warning("%d nodes are called %s; none of them takes part", len(namesakes), shown(name))
    return {name: namesakes[0] for name, namesakes in nodes.items() if len(namesakes) == 1}
