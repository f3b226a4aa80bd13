"""Other weights for a server that answers: read beside the steps that run, put in place between two of them.

One change at a time. Knows `LLM` and the engine's thread; nothing of HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxlamina.model_files import is_code
from jaxlamina.server.async_engine import AsyncEngine, Unavailable
from jaxlamina.server.errors import ApiError, of_failure, refused, unavailable
from jaxlamina.server.protocol import WeightsRequest
from jaxlamina.server.workshop import Busy, Workshop

if TYPE_CHECKING:
    from jaxlamina.llm import LLM

_LOAD_S = 1800.0
_PUT_S = 600.0


class Replacing:
    def __init__(self, llm: LLM, engine: AsyncEngine) -> None:
        self._llm, self._engine = llm, engine
        self._loading = Workshop(1)
        self._is_changing = False

    async def __call__(self, asked: WeightsRequest) -> dict[str, Any]:
        """Returns once every step is computed with the new weights. `ApiError`: the old ones are there then,
        but after a deadline, when the new ones may come yet."""
        if not asked.model:
            raise refused("model='' names nothing: name a folder or a file", "model")
        if is_code(asked.model):
            raise refused(f"model={asked.model!r} is a function: name a folder or a file", "model")
        if self._is_changing:
            raise ApiError(409, "the weights are being changed already", code="not_changed")
        self._is_changing = True
        try:
            return await self._change(asked)
        except TimeoutError:
            raise unavailable("the change takes too long; whether it will be made is not known") from None
        except Busy:
            raise ApiError(409, "the weights are being changed already", code="not_changed") from None
        except Unavailable as error:
            raise unavailable(str(error)) from None
        except Exception as error:  # noqa: BLE001 (whatever it is, who asks is told)
            raise of_failure(error) from None
        finally:
            self._is_changing = False

    async def _change(self, asked: WeightsRequest) -> dict[str, Any]:
        loaded = await self._loading.run(lambda: self._llm.load_weights(asked.model, asked.revision), _LOAD_S)
        await self._engine.ask(
            lambda _: self._llm.put_weights(loaded, keep_kv=asked.keep_kv), _PUT_S, may_fail=False
        )
        return {"status": "updated", "model": asked.model, "revision": asked.revision}
