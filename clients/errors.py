"""What can go wrong between a robot and its policy server."""


class PolicyError(RuntimeError):
    """The server refused a request, in its own words. The connection stays usable."""


class ConnectFailed(ConnectionError):
    """No connection could be made: refused for good, or not within the time allowed."""


class ReplyLost(ConnectionError):
    """The connection broke between a request and its reply: the server may or may not have acted on it.

    The next call connects again.
    """


class ReplyTimeout(ReplyLost, TimeoutError):
    """The reply did not come within the call's timeout. The connection was dropped, so that the reply never comes."""
