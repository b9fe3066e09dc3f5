# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server on this machine, for the helpers that answer in the place of a service."""

import threading
from http.server import ThreadingHTTPServer


class LocalServer:
    """Serves inside of a `with` block; a subclass returns its handler from `_handler`."""

    def __init__(self):
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
