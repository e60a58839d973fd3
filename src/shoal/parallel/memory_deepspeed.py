"""The memory of a step under DeepSpeed's ZeRO: what each stage divides, and the bucket that gradients go through."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shoal.parallel.deepspeed_config import Decided, build_config, read_file
from shoal.parallel.memory_fsdp import RATIO
from shoal.parallel.section import OptimSection
from shoal.parallel.sizes import LOSS, ROOT, Memory, Phase, Profile, Way, phase_words, step_batches


def deepspeed_moments(profile: Profile, way: Way) -> Iterator[Memory]:
    """What a worker holds in a step."""
    zero = _Zero(profile, way)
    made = 0
    for phase in profile.phases:
        yield zero.computing(phase, made)
        made += phase.made
        if phase.made and way.parallel.deepspeed.stage > 1:
            yield zero.summing(phase.kept, made)
    yield from zero.ending()


def _settings(profile: Profile, way: Way) -> dict[str, Any]:
    """What DeepSpeed is told of its buckets, the user's own file laid over it."""
    section = way.parallel.deepspeed
    decided = Decided(
        section=section.model_copy(update={"config": None}),
        optim=OptimSection(),
        precision=way.precision,
        clip_norm=None,
        global_batch=1,
        micro_batch=1,
        workers=way.degrees.shards,
        num_elements=profile.parameters,
        largest=max(piece.largest for piece in profile.pieces) // 4,
    )
    settings: dict[str, Any] = build_config(decided)["zero_optimization"]
    own = read_file(section.config).get("zero_optimization", {}) if section.config is not None else {}
    return settings | {key: value for key, value in own.items() if value != "auto"}


class _Zero:
    """Sizes under one stage."""

    def __init__(self, profile: Profile, way: Way) -> None:
        section, ratio, shards = way.parallel.deepspeed, RATIO[way.precision], way.degrees.shards
        settings = _settings(profile, way)
        self.profile, self.way, self.stage, self.ratio = profile, way, section.stage, ratio
        self.part = -(-profile.trained // shards)
        """Of one worker, in full precision: of the weights that the optimizer changes, of gradients, of moments."""
        # From stage 2 on, gradients are added up in full precision; stage 3 sends them before that.
        sent = 1.0 if self.stage == 2 else ratio
        self.gradients = int(profile.trained * sent)
        self.bucket = min(self.gradients, int(4 * sent * settings["reduce_bucket_size"]))
        self.largest_sum = max(self.bucket, int(sent * max(piece.largest for piece in profile.pieces)))
        """A weight that is larger than the bucket goes by itself."""
        live = settings.get("stage3_max_live_parameters", 0) + settings.get("stage3_prefetch_bucket_size", 0)
        self.live = int(4 * ratio * live)
        """What stage 3 keeps gathered for the next use, and gathers ahead."""
        computed = int(profile.weights * ratio) // (shards if self.stage == 3 else 1)
        gradients = self.part * (self.stage == 3 or (self.stage == 2 and way.micro_batches > 1))
        weights, optimizer, host = computed + self.part, way.moments * self.part, 0
        if section.offload_optimizer != "none":
            if way.on_gpu:
                weights, optimizer = computed, 0
                host = self.part * (2 + way.moments) * (section.offload_optimizer == "cpu")
            else:
                gradients += self.part
        if section.offload_params != "none" and way.on_gpu:
            weights, host = weights - computed, host + computed * (section.offload_params == "cpu")
        self.held = Memory(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            activations=step_batches(profile, way),
            buffers=profile.buffers + (self.bucket if self.stage == 3 else 0),
            host=host,
        )

    def computing(self, phase: Phase, made: int) -> Memory:
        """One phase, where `made` bytes of gradients are there already."""
        held, when = self.held, phase_words(self.profile, phase)
        if self.stage == 1 and self.way.micro_batches == 1:
            own = phase.peak_gradients
            return replace(held, gradients=made + own, activations=held.activations + phase.peak - own, when=when)
        moment = replace(held, activations=held.activations + phase.peak_apart, when=when)
        if self.stage == 1:
            return replace(moment, gradients=self.gradients)
        if self.stage == 2:
            return replace(
                moment, gradients=held.gradients + self._own(made), buffers=held.buffers + self._filled(made)
            )
        return replace(moment, buffers=held.buffers + self._gathered(phase))

    def _own(self, made: int) -> int:
        """Stage 2: this worker's part of the gradients, once the bucket was full; the last worker's come first."""
        return self._written(made, -(-self.gradients // self.way.degrees.shards)) if made > self.bucket else 0

    def _filled(self, made: int) -> int:
        """Stage 2: the bucket, from the first gradient on."""
        return self._written(made, self.bucket) if made else 0

    def _written(self, made: int, size: int) -> int:
        """What is there of memory for gradients: on the CPU, it is taken when it is written to."""
        return size if self.way.on_gpu else min(made, size)

    def _gathered(self, phase: Phase) -> int:
        if phase.piece == LOSS:
            return 0
        whole = int(self.profile.weights * self.ratio)
        return min(whole, int(self.profile.pieces[phase.piece].weights * self.ratio) + self.live)

    def summing(self, alive: int, made: int) -> Memory:
        """Gradients over the workers, of which so many bytes were made, while some activations live."""
        size = min(made, self.largest_sum)
        held = replace(self.held, activations=self.held.activations + alive, when="summing gradients")
        if self.stage == 3:  # in the order of the workers, and Gloo makes a copy of its own
            rest = int(self.profile.pieces[ROOT].weights * self.ratio)
            return replace(held, buffers=held.buffers + size * (1 if self.way.on_gpu else 2) + rest)
        parts = self._written(made, -(-self.gradients // self.way.degrees.shards))
        sent = size if size > self.bucket else -(-size // self.way.degrees.shards)
        return replace(held, gradients=held.gradients + parts, buffers=held.buffers + min(size, self.bucket) + sent)

    def ending(self) -> Iterator[Memory]:
        """Stage 1 sums only now; then comes the optimizer's step."""
        if self.stage == 1:
            held = self.held
            filling = replace(held, gradients=self.gradients, when="summing gradients")
            yield replace(filling, buffers=held.buffers + self.bucket + -(-self.bucket // self.way.degrees.shards))
        yield replace(self.held, gradients=self.held.gradients + self.part, when="optimizer")
        if self.stage < 3 and not self.way.on_gpu:  # Gloo puts what it gathers together in a copy of its own
            gathered = int(self.profile.trained * self.ratio)
            yield replace(self.held, gradients=0, buffers=self.held.buffers + gathered, when="gathering weights")
