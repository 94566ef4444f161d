"""XLA cannot compile Horovod's ops, so models with a distributed optimizer compile without it."""

from __future__ import annotations

from typing import Any

from hvdkit.log import get_logger

_log = get_logger("hvdkit.tf")
_done = False


def keep_out_of_xla(distributed: type) -> None:
    """Make ``compile(jit_compile=True or "auto")`` mean False for models whose optimizer is a ``distributed``.

    Keras asks one function whether a model can be compiled with XLA, some layers cannot; it now asks about the
    optimizer too. Nothing changes for other models.
    """
    global _done
    if _done:
        return
    from keras.src.trainers import trainer

    ask_layers = trainer.model_supports_jit

    def model_supports_jit(model: Any) -> bool:
        if isinstance(getattr(model, "optimizer", None), distributed):
            _log.info("jit_compile is off: XLA cannot compile Horovod's collectives. The results are the same.")
            return False
        return bool(ask_layers(model))

    trainer.model_supports_jit = model_supports_jit
    _done = True
