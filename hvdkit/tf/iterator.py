"""An iterator that notes, as it hands a batch out, the batch's share and the position after it.

tf.data prefetches, Keras draws inside a graph, loops draw in Python. Only the iterator itself knows which batch is
being worked on, so it sets two variables in the same breath: :func:`hvdkit.tf.collectives.batch_share`, by which the
gradients are weighted, and the dataset's position, which a checkpoint saves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops, optional_ops
from tensorflow.python.framework import ops

from hvdkit.tf.collectives import batch_share

# By dataset number: a traced function rebuilds the iterator from its type, which can carry a number but no variable.
positions: dict[int, tf.Variable] = {}


class NotingIterator(iterator_ops.OwnedIterator):  # type: ignore[misc]
    """Hands out ``element`` of a dataset of ``(element, share, position)``.

    ``on_draw`` is told of each draw made in Python by ``next()``: True for an element, False for the end.
    """

    def __init__(
        self,
        dataset: Any = None,
        components: Any = None,
        element_spec: Any = None,
        *,
        number: int,
        on_draw: Callable[[bool], None] | None = None,
    ) -> None:
        super().__init__(dataset, components, element_spec)
        self._number, self._on_draw = number, on_draw

    @property
    def element_spec(self) -> Any:
        """The type of what is handed out."""
        return self._element_spec[0]

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return NotingIteratorSpec(self._element_spec, self._number)

    def get_next(self) -> Any:
        """The next element; in a graph, the notes are taken whenever the graph runs."""
        return self._note(super()._next_internal())

    def __next__(self) -> Any:
        try:
            element = self.get_next()
        except tf.errors.OutOfRangeError:
            if self._on_draw is not None:
                self._on_draw(False)
            raise StopIteration from None
        if self._on_draw is not None:
            self._on_draw(True)
        return element

    def get_next_as_optional(self) -> Any:
        """The next element as a ``tf.experimental.Optional``, empty at the end (Keras' ``steps_per_execution``)."""
        with ops.colocate_with(self._iterator_resource):
            spec = self._element_spec
            drawn = optional_ops._OptionalImpl(
                tf.raw_ops.IteratorGetNextAsOptional(
                    iterator=self._iterator_resource,
                    output_types=self._flat_output_types,
                    output_shapes=self._flat_output_shapes,
                ),
                spec,
            )
        empty = tf.experimental.Optional.empty(self.element_spec)
        result = tf.cond(
            drawn.has_value(),
            lambda: tf.experimental.Optional.from_value(self._note(drawn.get_value()))._variant_tensor,
            lambda: empty._variant_tensor,
        )
        return optional_ops._OptionalImpl(result, self.element_spec)

    def _note(self, drawn: Any) -> Any:
        element, share, position = drawn
        batch_share().assign(share)
        positions[self._number].assign(position)
        return element


class NotingIteratorSpec(iterator_ops.IteratorSpec):  # type: ignore[misc]
    """The type of a :class:`NotingIterator`: two datasets have different types, epochs of one dataset the same."""

    __slots__ = ["_number"]

    def __init__(self, element_spec: Any, number: int) -> None:
        super().__init__(element_spec)
        self._number = number

    @property
    def value_type(self) -> type:
        """Class of the values of this type."""
        return NotingIterator

    def _serialize(self) -> tuple[Any, ...]:
        return (self._element_spec, self._number)

    def _from_components(self, components: Any) -> NotingIterator:
        return NotingIterator(None, components, self._element_spec, number=self._number)

    @staticmethod
    def from_value(value: NotingIterator) -> NotingIteratorSpec:
        """The type of ``value``."""
        return NotingIteratorSpec(value._element_spec, value._number)
