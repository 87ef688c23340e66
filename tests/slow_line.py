"""A line to the daemon that delays every packet, or lets a connection hang.

A browser's own throttling delays each request once. It does not show what connecting
and an answer take together.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from threading import Thread


class SlowLine:
    """A TCP proxy on a port of its own."""

    def __init__(self, target: int, round_trip: float = 0) -> None:
        self._target = target
        self._round_trip = round_trip
        self.hanging = (
            0  # how many of the next connections are accepted and then ignored
        )
        self.port = 0

    async def begin(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = int(server.sockets[0].getsockname()[1])

    async def end(self) -> None:
        """Drop all connections."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.hanging:
            self.hanging -= 1
            await asyncio.sleep(3600)  # seconds: for longer than any test
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        handshake = self._round_trip  # of TCP, which the browser has not waited for
        ways = ((reader, back, handshake), (there, writer, 0))
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(*(self._carry(*way) for way in ways))

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, wait: float
    ) -> None:
        """Pass data on, each part half a round trip after it arrived."""
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            data = b"x"
            while data:
                due, data = await parts.get()
                await asyncio.sleep(due - loop.time())
                sink.write(data)
                await sink.drain()
            sink.close()

        delivery = loop.create_task(deliver())
        ready = loop.time() + wait
        data = b"x"
        while data:
            data = await source.read(65536)
            left = max(loop.time(), ready)
            parts.put_nowait((left + self._round_trip / 2, data))
        await delivery


@contextlib.contextmanager
def slow_line(target: int, round_trip: float = 0) -> Iterator[SlowLine]:
    """Run a line to a port of this machine; `round_trip` is in seconds."""
    line = SlowLine(target, round_trip)
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(line.begin(), loop).result()
    try:
        yield line
    finally:
        asyncio.run_coroutine_threadsafe(line.end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
