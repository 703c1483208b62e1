"""The plan of a run at a topology: refused where the run would refuse, else every number that follows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from wan_trainer.config.resolution import resolve, topology_of
from wan_trainer.config.schema import TrainConfig
from wan_trainer.config.specs import RunSpec
from wan_trainer.models.wan.architecture import ModelShape, check_adapters, check_heads, model_shape
from wan_trainer.models.wan.directory import check_directory, read_directory
from wan_trainer.models.wan.grad_window import check_grad_window
from wan_trainer.planning.memory import Memory, estimate_memory
from wan_trainer.planning.refl import NOT_COUNTED
from wan_trainer.planning.timing import PhaseTimes, StepTimes, estimate_steps
from wan_trainer.planning.traffic import Traffic, estimate_traffic
from wan_trainer.planning.workload import Workload, count_work
from wan_trainer.topology import Topology
from wan_trainer.types import UserError


@dataclass(frozen=True)
class Plan:
    """The numbers of a run. times: None unless the times of its phases are known."""

    spec: RunSpec
    topology: Topology
    model: ModelShape
    work: Workload
    memory: Memory
    traffic: Traffic
    times: StepTimes | None
    notes: tuple[str, ...]

    def as_data(self) -> dict[str, object]:
        """JSON-able numbers; memory and traffic in bytes, times in seconds."""
        topology = {
            **dataclasses.asdict(self.topology),
            "ranks_per_prompt": str(self.topology.ranks_per_prompt),
        }
        shape, memory = self.model.transformer, self.memory
        times = None
        if self.times is not None:
            times = {**dataclasses.asdict(self.times), "speedup": self.times.speedup}
        return {
            "family": self.spec.model.family,
            "topology": topology,
            "work": dataclasses.asdict(self.work),
            "model": {
                **dataclasses.asdict(shape),
                "parameters": shape.elements,
                "experts": self.model.experts,
                "text_encoder_bytes": self.model.text_encoder_bytes,
                "vae_bytes": self.model.vae_bytes,
                "found": self.model.found,
            },
            "memory": {**dataclasses.asdict(memory), "peak": memory.peak, "peak_phase": memory.peak_phase},
            "traffic": dataclasses.asdict(self.traffic),
            "times": times,
            "notes": self.notes,
        }


def make_plan(config: TrainConfig, nodes: int, nproc: int, phases: PhaseTimes | None = None) -> Plan:
    """The plan of `config` on `nodes` x `nproc` processes. phases: of one step, given or measured.

    `device: auto` is planned as CUDA. Raises UserError with all that the run would refuse because of its
    numbers; what a machine lacks is a note, so that a recipe can be planned anywhere.
    """
    on_cuda = config.device != "cpu"
    problems: list[str] = []
    topology: Topology | None = None
    spec: RunSpec | None = None
    try:
        topology = topology_of(config, nodes, nproc)
    except UserError as error:
        problems += error.problems
    try:
        spec = resolve(config, cuda_available=on_cuda)
    except UserError as error:
        problems += error.problems
    if spec is not None:
        model = model_shape(spec.model.path, spec.model.family)
        heads = check_heads(model.transformer, config.tensor_parallel_size)
        adapters = check_adapters(model, spec.model)
        problems += [problem for problem in (heads, adapters) if problem]
        whole = not check_directory(spec.model.path, spec.model.family)
        if spec.refl is not None and whole:
            directory = read_directory(spec.model.path, spec.model.family)
            problems += check_grad_window(spec, spec.refl, directory)
        if topology is not None:
            try:
                work = count_work(spec, topology)
            except UserError as error:
                problems += error.problems
            else:
                if not problems:
                    return Plan(
                        spec=spec,
                        topology=topology,
                        model=model,
                        work=work,
                        memory=estimate_memory(spec, topology, model, work),
                        traffic=estimate_traffic(spec, topology, model, work),
                        times=None if phases is None else estimate_steps(phases, topology.waves),
                        notes=_notes(config, spec, topology, model, whole=whole),
                    )
    raise UserError(*problems)


def _notes(
    config: TrainConfig, spec: RunSpec, topology: Topology, model: ModelShape, *, whole: bool
) -> tuple[str, ...]:
    """whole: the model directory is complete."""
    notes: list[str] = []
    if config.fsdp and config.hsdp and topology.nodes == 1:
        notes.append("hsdp: true is plain fsdp on one node")
    if not model.found:
        notes.append(
            f"no model in {config.model_path}: sizes are those of the published {spec.model.family}, "
            "text encoder in bfloat16, VAE in float32"
        )
    if spec.refl is not None:
        notes.append(NOT_COUNTED)
        if model.experts > 1 and not whole:
            notes.append("whether the gradient window stays in the trained expert was not checked")
    return tuple(notes)
