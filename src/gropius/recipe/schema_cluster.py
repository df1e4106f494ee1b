"""`[cluster]`: the processes of one run, and where they run. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gropius.recipe.fields import Count, CountOrZero, Positive, Table, Text, as_tuple


class ClusterTable(Table):
    """`[cluster]`: the processes of one run. They share the work and never change what it means."""

    trainer_ranks: Count = Field(1, description="processes that train one model, divided over them (FSDP2)")
    shard: Literal["optimiser", "all"] = Field(
        "optimiser", description='"optimiser": weights whole during a step; "all": layer by layer, least memory'
    )
    engines: CountOrZero = Field(
        0, description="processes that draw, each with its own copy of the model; 0 = the trainer draws itself"
    )
    engine_devices: Annotated[tuple[Text, ...], BeforeValidator(as_tuple)] = Field(
        (), description='model.device of each engine, in turn; empty = the GPUs that the ranks leave, else as "auto"'
    )
    restarts: CountOrZero = Field(
        3, description="times that lost ranks are started again from the last checkpoint, or lost engines at once"
    )
    deadline_s: Positive = Field(600.0, description="seconds for one exchange between ranks, or for an engine to start")
    bind: Text = Field("127.0.0.1", description="address that ranks and engines of a machine listen on")
    reward_hosts: CountOrZero = Field(0, description="processes elsewhere that hold the reward pool (--cluster)")
    lost_after_s: Positive = Field(30.0, description="a part that does not answer for so long is lost (--cluster)")
