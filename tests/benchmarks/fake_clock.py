"""A clock that runs nothing."""


class FakeClock:
    """Every call takes what is in ``us``, every replay ``jitter`` more than the last."""

    def __init__(self, us=10.0, jitter=0.0):
        self.us, self.jitter = us, jitter
        self.recorded = []  # the calls of each recording, in order
        self.replays = []  # for each request: (recording, times)

    def record(self, calls):
        index = len(self.recorded)
        self.recorded.append(list(calls))

        def replay(times):
            self.replays.append((index, times))
            return [(self.us + i * self.jitter) * len(calls) for i in range(times)]

        return replay

    live = record
