"""Requests that wait and try again: urllib3's Retry, which also tells what happens meanwhile."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import InvalidHeader
from urllib3.util import Retry


@dataclass(frozen=True)
class Limits:
    """How long and how often to try. Times in seconds."""

    workers: int = 8  # files at a time
    attempts: int = 7  # in a row that bring no new byte
    pause: float = 1.0  # before the second attempt, doubled for each further one
    connect: float = 5
    read: float = 20  # without a byte
    out_of_reach: float = 20  # without any answer from the hub before giving up
    retry_after: int = 600  # the longest pause that the hub can ask for


def without_secrets(error: object) -> str:
    """An error's text without the token, passwords in addresses and signed queries."""
    text = re.sub(r"(?<=//)[^/@\s]+@|(?<=\?)[^\s)'\"]+", "...", str(error))
    token = os.environ.get("HF_TOKEN")
    return text.replace(token, "...") if token else text


class WatchedRetry(Retry):
    """urllib3's Retry that tells a function about every answer and error, also those it retries.

    An unreadable Retry-After header counts as none.
    """

    watcher: Callable = staticmethod(lambda response, error: None)

    def new(self, **changes) -> "WatchedRetry":
        copy = super().new(**changes)
        copy.watcher = self.watcher
        return copy

    def increment(self, method=None, url=None, response=None, error=None, **rest) -> "WatchedRetry":
        self.watcher(response, error)
        return super().increment(method, url, response, error, **rest)

    def parse_retry_after(self, retry_after: str) -> float:
        try:
            return super().parse_retry_after(retry_after)
        except InvalidHeader:
            return 0.0


def retrying_session(limits: Limits, watcher: Callable) -> requests.Session:
    """A session whose requests are retried on no connection, silence, 408, 429 and 5xx.

    After the last attempt the answer is returned, whatever its status.
    watcher: called with (response or None, error or None) for each attempt that failed.
    """
    retry = WatchedRetry(
        total=limits.attempts,
        status_forcelist={408, 429, *range(500, 600)},
        backoff_factor=limits.pause,
        backoff_jitter=limits.pause,
        retry_after_max=limits.retry_after,
        raise_on_status=False,
    )
    retry.watcher = watcher
    session = requests.Session()
    for scheme in ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry))
    return session
