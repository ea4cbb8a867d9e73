"""`Loading`: turns a configuration into a loaded model and the runner that computes it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, ModelError
from weft.engine.memory.model_id import model_id
from weft.engine.memory.ssd_store import SsdStore, Store
from weft.engine.memory.store_file import StoreFile
from weft.engine.memory.transfer import Bytes, Remainders
from weft.engine.model.directory import ends_of, read_config
from weft.engine.model.drafts.spec import DraftWeights
from weft.engine.model.implementation import OWN_LAYERS, choose_spec
from weft.engine.model.weights import Weights
from weft.engine.progress import Phases, notice
from weft.engine.ranks.group import OneRank, Ranks
from weft.engine.ranks.leader import lead
from weft.engine.runner.device.compile_job import CompileJob
from weft.engine.runner.device.image_rows import ImageRows
from weft.engine.runner.device.runner import Runner
from weft.engine.runner.options.resolve import resolve, served_as
from weft.engine.runner.start.load import load_model, within_memory
from weft.engine.runner.start.make import make_runner
from weft.engine.runner.start.vision import load_image_rows, served_vision
from weft.engine.wire.weight_exchange import WeightExchange

if TYPE_CHECKING:
    from weft.engine.model.transformers_impl.module import TransformersModule


class Loaded(NamedTuple):
    weights: Weights | TransformersModule
    runner: Runner
    make_store: Callable[[StoreFile, Bytes, Remainders | None], Store]
    store: StoreFile | None  # File of the SSD tier if every rank has one.
    images: ImageRows | None = None  # Vision tower and embeddings of images; None: the model takes text only.
    draft: DraftWeights | None = None  # Weights of the model that drafts.


class Loading:
    """Resolves the configuration; `run` then loads the model."""

    def __init__(self, config: EngineConfig, ranks: OneRank, compiling: CompileJob | None) -> None:
        self._config, self._ranks = config, ranks
        self._compiling = compiling or CompileJob.begin(config)
        chosen, implementation = choose_spec(config)
        self.spec = served_as(chosen, config)  # Spec of the unsharded model.
        if implementation != OWN_LAYERS:
            notice(f"{self.spec.architecture}: {implementation}")
        path = config.model_path
        ends = ends_of(path, read_config(path), self.spec.vocab_size, config.chat_template)
        sources = ends.sources or {i: ["default"] for i in self.spec.eos_token_ids}
        self.ends = ends._replace(sources=sources)
        self.spec = replace(self.spec, eos_token_ids=tuple(sources))
        self.own = self.spec.shard(0, config.tensor_parallel_size)  # This rank's shard of it.
        self.resolved = resolve(config, self.own)
        self.vision = served_vision(read_config(path), self.spec, config, self.resolved)  # None: text only.
        if self.vision is not None and self.resolved.adapter_slots:
            raise ConfigError("LoRA adapters do not run on a GPU for a model that takes images; use --device cpu")
        if self.vision is not None and config.speculation == "auto" and self.resolved.device.type == "cuda":
            notice("--speculation auto is off: on a GPU, it was not tested with images")
            self.resolved = replace(self.resolved, drafting=None)
        self.model_id = self._model_id()

    def run(self, phases: Phases, exchange: WeightExchange | None, store: StoreFile | None) -> Loaded:
        """Load the model. store: this rank's file of the SSD tier. Raises `WeftError`, one line."""
        try:
            with within_memory():
                return self._run(phases, exchange, store)
        except BaseException:
            if self._compiling is not None:
                self._compiling.stop()
            raise

    def _run(self, phases: Phases, exchange: WeightExchange | None, store: StoreFile | None) -> Loaded:
        # Load on a thread that ends: an OpenMP team left here would slow down the runner's (see CpuRunner).
        with ThreadPoolExecutor(1) as loader:
            draft = loader.submit(self._load_draft).result()
            weights = loader.submit(self._load, phases, exchange).result()
            images = loader.submit(self._load_images, phases).result()
        if self._compiling is not None:
            self._compiling.wait(phases)
        phases.end()
        if self._model_id() != self.model_id:
            raise ModelError(f"{self._config.model_path} changed while it was being loaded: start again")
        return self._with_runner(weights, phases, store, images, draft)

    def _model_id(self) -> str:
        resolved = self.resolved
        return model_id(self._config, resolved.kv, self.own, resolved.compute_dtype, resolved.max_model_len)

    def _load(self, phases: Phases, exchange: WeightExchange | None) -> Weights | TransformersModule:
        own_exchange = None if isinstance(self._ranks, Ranks) else exchange
        return load_model(self.own, self._config, self.resolved, phases, exchange=own_exchange, model=self.model_id)

    def _load_images(self, phases: Phases) -> ImageRows | None:
        if self.vision is None:
            return None
        return load_image_rows(self.vision, self.spec, self._config, self.resolved, phases)

    def _load_draft(self) -> DraftWeights | None:
        if (draft := self.resolved.draft) is None:
            return None
        return draft.load(self.resolved.weight_dtype, self.resolved.max_model_len, self.resolved.device)

    def _with_runner(
        self, weights: Weights | TransformersModule, phases: Phases, store: StoreFile | None, images: ImageRows | None,
        draft: DraftWeights | None,
    ) -> Loaded:  # fmt: skip
        config, resolved = self._config, self.resolved
        if not isinstance(self._ranks, Ranks):
            runner = make_runner(
                self.spec, weights, config, resolved, phases, self._compiling, image_rows=images, draft=draft
            )
            return Loaded(weights, runner, SsdStore, store, images, draft)
        assert isinstance(weights, Weights)
        leading = lead(
            self._ranks.links, self.own, weights, config, resolved, self.model_id, phases, self._compiling, images,
            store=store is not None,
        )  # fmt: skip
        return Loaded(weights, leading, leading.make_store, store if leading.stores else None, images)
