"""Which target layers a drafter reads: ``target_layer_ids``.

Id ``i`` is the output of decoder layer ``i``, before the final norm. Other conventions count the
embedding as 0 and are one higher; they are brought down to ours where they are read.
"""

from collections.abc import Sequence

from ..fields import Fields

__all__ = ["check_layer_ids", "default_layer_ids", "layer_ids_from_gguf", "layer_ids_from_hf"]


def default_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """The ids of a drafter that was saved without any.

    Args:
        num_target_layers: layers of the target.
        count: how many the drafter reads (columns of ``fc`` / target hidden size).

    >>> default_layer_ids(64, 5)
    (1, 16, 31, 46, 61)
    """
    if count == 1:
        return (num_target_layers // 2,)
    # Python rounds halves to even; so does the code that trained with these ids
    return tuple(round(1 + k * (num_target_layers - 4) / (count - 1)) for k in range(count))


def layer_ids_from_hf(fields: Fields) -> tuple[int, ...] | None:
    """Ids that a Hugging Face config states; None if it states none.

    Raises:
        CheckpointError: the value is no list of integers, or two keys disagree.
    """
    field = "target_layer_ids"
    stated = _read(fields, field, 0, "target_layer_ids", "dspark_target_layer_ids")
    shifted = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids", "layer_ids")
    source = fields.sources.get(field, "")
    above = _read(fields, field, 1, *shifted)
    if stated is None and above is None and fields.found("target_layers"):
        fields.fail(
            "target_layers does not say whether it counts from the embedding or from layer 0; "
            "write target_layer_ids (0 is the output of layer 0)"
        )
    if stated is not None and above is not None and stated != above:
        fields.fail(
            f"{source} must agree with {fields.sources[field]} - 1, got {[*stated]} and {[*above]}"
        )
    if stated is not None:
        fields.sources[field] = source
    elif above is not None:
        fields.sources[field] += " - 1"
    return stated if stated is not None else above


def layer_ids_from_gguf(fields: Fields, arch: str) -> tuple[int, ...] | None:
    """Ids that GGUF metadata states: ``target_layers`` is one higher, ``target_layer_ids`` raw.

    Raises:
        CheckpointError: the value is no list of integers, or two keys disagree.
    """
    field = "target_layer_ids"
    raw = _read(fields, field, 0, f"{arch}.dflash.target_layer_ids", f"{arch}.target_layer_ids")
    source = fields.sources.get(field, "")
    above = _read(fields, field, 1, f"{arch}.target_layers")
    if above is None:
        return raw
    fields.sources[field] += " - 1"
    if raw is not None and raw != above:
        fields.fail(f"{source} must agree with {arch}.target_layers - 1, got {[*raw]}, {[*above]}")
    return above


def check_layer_ids(
    fields: Fields, ids: Sequence[int], num_target_layers: int | None, inputs: int, width: int
) -> None:
    """Check ids against the target's depth and the width of ``fc``.

    Args:
        fields: for messages.
        ids: raw ids in file order.
        num_target_layers: of the target, if known.
        inputs: columns of ``fc`` (hidden size of the drafter where there is no ``fc``).
        width: hidden size of the target.

    Raises:
        CheckpointError: a duplicate, an id out of range, or a width that does not fit.
    """
    key = fields.sources["target_layer_ids"]
    shown = f"{key}: target_layer_ids"
    if not ids:
        fields.fail(f"{shown} must name at least one layer, got none")
    if len(set(ids)) != len(ids):
        fields.fail(f"{shown} must not repeat a layer, got {[*ids]}")
    if min(ids) < 0:
        fields.fail(f"{shown} must be at least 0, got {[*ids]}")
    if num_target_layers is not None and max(ids) >= num_target_layers - 1:
        fields.fail(
            f"{shown} must be below {num_target_layers - 1} (the target has {num_target_layers} "
            f"layers, and engines disagree about the last one's output), got {[*ids]}"
        )
    if list(ids) != sorted(ids):
        fields.note(f"target_layer_ids: {[*ids]} is not increasing; the order is kept")
    if len(ids) * width != inputs:
        fields.fail(
            f"{shown} must fill the {inputs} columns of fc.weight, got {len(ids)} layers of {width}"
        )


def _read(fields: Fields, field: str, shift: int, *names: str) -> tuple[int, ...] | None:
    value = fields.raw(field, *names)
    if value is None:
        return None
    return tuple(i - shift for i in fields.items(int, fields.sources[field], value))
