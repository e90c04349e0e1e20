"""Identities. Each is an int at run time and a type of its own to the checker."""

from typing import Final, NewType

SequenceId = NewType("SequenceId", int)
"""One sequence of tokens, unique for the life of the process."""

BlockId = NewType("BlockId", int)
"""One KV block, 1 .. num_blocks. Block 0 is the trash block, outside the ledger."""

Slot = NewType("Slot", int)
"""One row of the device's slot table, 0 .. max_num_seqs - 1."""

Epoch = NewType("Epoch", int)
"""How often a slot has been bound; tells a slot's present owner from its earlier ones."""

StepNumber = NewType("StepNumber", int)
"""A launched step, counted from 1 without gaps. 0 means before the first."""

TRASH_BLOCK: Final = BlockId(0)
"""Where done rows and padding write their K/V."""

NO_STEP: Final = StepNumber(0)

NO_SEQUENCE: Final = SequenceId(0)
"""The id that no sequence has."""
