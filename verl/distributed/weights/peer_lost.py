# SPDX-License-Identifier: Apache-2.0
"""The error of a process whose peer went away; known before torch is imported."""


class PeerLostError(ConnectionError):
    """The process at the other end of a link died, hung, or has left."""
