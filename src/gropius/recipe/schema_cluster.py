"""`[cluster]`: the processes of one run, and where they run. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gropius.recipe.fields import Count, CountOrZero, Positive, Table, Text


class ClusterTable(Table):
    """`[cluster]`: the processes of one run. They share the work and never change what it means."""

    trainer_ranks: Count = Field(1, description="processes that train one model, divided over them (FSDP2)")
    shard: Literal["optimiser", "all"] = Field(
        "optimiser", description='"optimiser": weights whole during a step; "all": layer by layer, least memory'
    )
    restarts: CountOrZero = Field(3, description="times that lost ranks are started again from the last checkpoint")
    deadline_s: Positive = Field(600.0, description="seconds for one exchange between ranks")
    bind: Text = Field("127.0.0.1", description="address that ranks and engines of a machine listen on")
