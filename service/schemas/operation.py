"""Answers of GET /version and GET /load, which routers in front of several servers read."""

from __future__ import annotations

from pydantic import BaseModel, Field


class VersionInfo(BaseModel):
    """The server's software."""

    version: str = Field(description="Version of minserve.")


class LoadReport(BaseModel):
    """The load of a server's engines, summed. Names are those of the metrics in /metrics."""

    server_load: int = Field(
        description="Requests that run or wait: vLLM's name for what a router balances by."
    )
    requests_running: int = Field(description="Sequences that hold a slot.")
    requests_waiting: int = Field(description="Requests that wait for a slot.")
    waiting_prompt_tokens: int = Field(
        description="Prompt tokens of the requests that wait for a slot."
    )
    state_slots_used: int = Field(description="State slots in use.")
    state_slots_total: int = Field(description="State slots of all engines.")
    state_usage_ratio: float = Field(description="Used state slots as a part of all, 0 to 1.")
