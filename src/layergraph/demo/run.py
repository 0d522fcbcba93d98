"""The steps of the demo, in order. All that it prints is made and measured while it runs."""

from __future__ import annotations

import importlib.util
import platform
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from torch import nn
from torch.nn import functional as F

import layergraph as lg
from layergraph.demo.show import errors_table, one_layer, texts_table, timings_table
from layergraph.demo.timing import Timing, interleaved
from layergraph.errors import MissingFileError
from layergraph.progress import progress_line

MODEL = Path(__file__).parent / "model"
ADAPTERS = Path(__file__).parent / "adapters"
PROMPT = "The import statement"
SHADOW_PROMPT = "If an object"
# Qwen2-VL's own: patches of 2 frames by 14 by 14 pixels, width 1,280. Two images of different size.
GRIDS = ((1, 16, 16), (1, 8, 12))
PATCH = 3 * 2 * 14 * 14


@dataclass
class Demo:
    """One run of the demo, and what it found out.

    Attributes:
        quick: a smaller tower, fewer rounds of timing.
        console: where to print.
        errors: by output, the largest difference from eager (0.0 is bit-equal).
        timings: by what was timed.
        checks: what must hold, and whether it did.
    """

    quick: bool = False
    console: Console = field(default_factory=lambda: make_console())
    errors: dict[str, float] = field(default_factory=dict)
    timings: dict[str, dict[str, Timing]] = field(default_factory=dict)
    checks: dict[str, bool] = field(default_factory=dict)

    def run(self) -> Demo:
        start = time.perf_counter()
        threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
        versions = f"layergraph {lg.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        self.console.print(Panel(f"{versions}, {threads}\nNothing is downloaded.", title="layergraph demo"))
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            tapped, bare = self.language_model()
            self.save_and_undo(tapped, bare, Path(folder) / "saved")
            self.vision_tower(Path(folder) / "tower")
            self.shadow_adapters(bare)
        failed = [name for name, holds in self.checks.items() if not holds]
        seconds = f"{time.perf_counter() - start:.0f} s"
        verdict = f"FAILED: {', '.join(failed)}" if failed else f"all {len(self.checks)} checks hold"
        hints = "Next: layergraph optimize --help   README.md   docs/flow.md"
        self.console.print(Panel(f"{verdict}   ({seconds})\n{hints}", title="done"))
        return self

    # 1. A language model gets taps -----------------------------------------------------------------------------------

    def language_model(self) -> tuple[lg.Program, lg.Program]:
        self._title("1", "a trained language model, three hidden states as outputs")
        model, tokenizer = load_language_model()
        inputs = dict(tokenizer(PROMPT, return_tensors="pt"))
        with torch.no_grad():
            text = tokenizer.decode(model.generate(**inputs, max_new_tokens=20, do_sample=False)[0])
        n_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._say(f"{type(model).__name__}, {n_parameters:,} parameters, bundled. It writes: {text!r}")
        self._code('bare = lg.trace(model)\ntapped = bare.apply(lg.TapOutputs("hidden_states", entries=[0, 2, -1]))')
        with progress_line(None) as say:
            bare = lg.trace(model, progress=say)
            tapped = bare.apply(lg.TapOutputs("hidden_states", entries=[0, 2, -1]), verify=True, progress=say)
        self._code("print(tapped.report())")
        self._plain(str(tapped.report()))
        self._code("tapped.print()", "one layer of it; equal layers are printed once")
        self._plain(one_layer(tapped))
        self._code("print(bare.diff(tapped))", "no node is added: a tap returns what is computed anyway")
        self._plain(bare.diff(tapped))
        with torch.no_grad():
            expected = model(**inputs, output_hidden_states=True)
        found = tapped(**inputs)
        count = len(expected.hidden_states)
        pairs = {"logits": (found.logits, expected.logits)}
        for entry in (0, 2, count - 1):
            pairs[f"hidden_states[{entry}]"] = (found.hidden_states[entry], expected.hidden_states[entry])
        self._compare("the program against the eager model", pairs, 0.0)
        return tapped, bare

    # 2. Saved, loaded, undone ----------------------------------------------------------------------------------------

    def save_and_undo(self, tapped: lg.Program, bare: lg.Program, folder: Path) -> None:
        self._title("2", "saved, loaded, and the tap taken out again")
        self._code('tapped.save("saved/")\nloaded = lg.load("saved/")\nbare_again = loaded.remove("tap-outputs")')
        with progress_line(None) as say:
            tapped.save(folder, progress=say)
            loaded = lg.load(folder, progress=say)
            undone = loaded.remove("tap-outputs", progress=say)
        for path in sorted(folder.iterdir()):
            if not path.name.startswith("."):
                self._say(f"  {path.stat().st_size:>10,}  {path.name}")
        self._check("the loaded program has the fingerprint of the saved one", loaded.fingerprint == tapped.fingerprint)
        self._check("without the tap, the fingerprint of the bare trace", undone.fingerprint == bare.fingerprint)
        original, again = load_language_model()[0].state_dict(), load_language_model(folder)[0].state_dict()
        same = all(torch.equal(again[name], tensor) for name, tensor in original.items())
        self._check("transformers loads the folder as a checkpoint, weights equal bit for bit", same)

    # 3. A vision tower is fused --------------------------------------------------------------------------------------

    def vision_tower(self, folder: Path) -> None:
        self._title("3", "a Qwen2-VL vision tower: Conv3d becomes a matrix product")
        tower = make_tower(depth=1 if self.quick else 2)
        self._say(f"width 1,280, patches of {PATCH:,} numbers, {len(tower.blocks)} blocks, random weights")
        self._code('fused = lg.optimize(tower, passes=["fuse-patch-embed"], verify=True)\nprint(fused.report())')
        with progress_line(None) as say:
            bare = lg.trace(tower, progress=say)
            fused = bare.apply("fuse-patch-embed", verify=True, progress=say)
        self._plain(str(fused.report()))
        self._code("print(bare.diff(fused))")
        self._plain(bare.diff(fused))
        n_patches = sum(t * h * w for t, h, w in GRIDS)
        inputs = {"hidden_states": torch.randn(n_patches, PATCH), "grid_thw": torch.tensor(GRIDS)}
        with torch.no_grad():
            expected = tower(**inputs)
        found = fused(**inputs)
        pairs = {name: (found[name], expected[name]) for name in ("last_hidden_state", "pooler_output")}
        self._compare(f"two images of different size ({n_patches} patches)", pairs, 1e-5)
        with progress_line(None) as say:
            fused.save(folder, progress=say)
            weights = lg.load(folder, progress=say).state_dict()
        same = all(torch.equal(weights[name], tensor) for name, tensor in tower.state_dict().items())
        self._check("saved weights have the model's own names and shapes, equal bit for bit", same)
        self._time(tower, fused, inputs)

    def _time(self, tower: nn.Module, fused: lg.Program, inputs: dict[str, torch.Tensor]) -> None:
        rounds = 7 if self.quick else 15
        embed: Any = tower.patch_embed
        patches = torch.randn(256 if self.quick else 1024, PATCH)
        with progress_line(None) as say:
            say("timing")
            dynamic = {"hidden_states": {0: "patches"}}
            program = lg.trace(embed, {"hidden_states": patches}, dynamic=dynamic, progress=False)
            program = program.apply("fuse-patch-embed", progress=False)
            weight = embed.proj.weight.detach().reshape(embed.proj.weight.shape[0], -1)
            with torch.no_grad():
                alternatives = {
                    "eager Conv3d": lambda: embed(patches),
                    "program, fused": lambda: program(patches),
                    "bare F.linear": lambda: F.linear(patches, weight),
                }
                self.timings["patch embed"] = interleaved(alternatives, rounds=rounds)
                whole = {"eager": lambda: tower(**inputs), "program, fused": lambda: fused(**inputs)}
                self.timings["tower"] = interleaved(whole, rounds=5, warmup=1)
        sizes = {"patch embed": len(patches), "tower": len(inputs["hidden_states"])}
        for name, timings in self.timings.items():
            n_rounds = len(next(iter(timings.values())).runs)
            title = f"{name}, {sizes[name]} patches, float32, {n_rounds} interleaved rounds"
            self.console.print(timings_table(title, timings))

    # 4. Two shadow adapters ------------------------------------------------------------------------------------------

    def shadow_adapters(self, bare: lg.Program) -> None:
        self._title("4", "two trained shadow adapters in one graph, switched without tracing again")
        self._code(
            'woven = bare.apply(lg.WeaveShadow("adapters/reference", name="reference"))\n'
            'woven.add_adapter("adapters/code", "code")\n'
            'woven.generate(ids, adapter="code", max_new_tokens=24)\n'
            'woven.detach_shadow("reference").generate(ids, max_new_tokens=24)'
        )
        model, tokenizer = load_language_model()
        options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
        inputs = tokenizer(SHADOW_PROMPT, return_tensors="pt")
        with progress_line(None) as say:
            woven = bare.apply(lg.WeaveShadow(ADAPTERS / "reference", name="reference"), progress=say)
            fingerprint = woven.fingerprint
            woven.add_adapter(ADAPTERS / "code", "code")
            say("generating")
            made = {name: woven.generate(**inputs, adapter=name, **options)[0] for name in (None, "reference", "code")}
            detached = woven.detach_shadow("reference").generate(**inputs, **options)[0]
        texts = {name or "no adapter": tokenizer.decode(tokens) for name, tokens in made.items()}
        texts["reference, detached"] = tokenizer.decode(detached)
        self.console.print(texts_table(f"24 tokens after {SHADOW_PROMPT!r}, greedy", texts))
        self._check("one graph for all of them", woven.fingerprint == fingerprint)
        with torch.no_grad():
            plain = model.generate(**inputs, use_cache=False, **options)[0]
        self._check("without an adapter, the tokens of the eager model", torch.equal(made[None], plain))
        if importlib.util.find_spec("peft") is None:
            self._say("  peft is not installed: the comparison with it is left out")
            return
        from peft import PeftModel

        same = []
        for name in ("reference", "code"):
            theirs = PeftModel.from_pretrained(load_language_model()[0], str(ADAPTERS / name)).eval()
            with torch.no_grad():
                # Without a cache: peft's own cached tokens are wrong with current transformers.
                same.append(torch.equal(theirs.generate(**inputs, use_cache=False, **options)[0], made[name]))
        self._check("with each adapter, the tokens of peft without a cache", all(same))

    # Printing --------------------------------------------------------------------------------------------------------

    def _title(self, number: str, text: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{number}. {text}", align="left")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def _plain(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _code(self, code: str, note: str = "") -> None:
        self.console.print()
        text = "\n".join(f">>> {line}" for line in code.splitlines()) + (f"   # {note}" if note else "")
        self.console.print(Syntax(text, "python", background_color="default", word_wrap=True))

    def _compare(self, title: str, pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], allowed: float) -> None:
        errors = {name: float((found - expected).abs().max()) for name, (found, expected) in pairs.items()}
        self.errors.update(errors)
        self.console.print(errors_table(title, errors))
        what = "bit-equal to eager" if allowed == 0.0 else f"within {allowed:g} of eager"
        self._check(f"every output is {what}", all(error <= allowed for error in errors.values()))

    def _check(self, name: str, holds: bool) -> None:
        self.checks[name] = holds
        style = "green" if holds else "bold red"
        self.console.print(f"[{style}]{'ok' if holds else 'FAILED'}[/]  {name}", highlight=False)


def make_console() -> Console:
    """The terminal; in a log, wide enough that tables and graphs do not wrap."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def load_language_model(folder: Path | None = None) -> tuple[Any, Any]:
    """The bundled model, or the same one from another folder, and the bundled tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (MODEL / "config.json").is_file():
        raise MissingFileError(
            "the demo's language model is not there",
            path=f"{MODEL.parent.name}/{MODEL.name}",
            do="install the package again, or make it with scripts/make_demo_model.py",
        )
    # In bfloat16 the first two tokens of a greedy choice tie now and then, and processors break ties differently.
    model = AutoModelForCausalLM.from_pretrained(folder or MODEL, dtype=torch.float32, local_files_only=True).eval()
    return model, AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


def make_tower(depth: int) -> nn.Module:
    """A Qwen2-VL vision tower of its real width, with few blocks and random weights."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    config = Qwen2VLVisionConfig(depth=depth, embed_dim=1280, hidden_size=1536, num_heads=16)
    tower: nn.Module = Qwen2VisionTransformerPretrainedModel(config).eval()
    return tower


def run_demo(quick: bool = False, console: Console | None = None) -> Demo:
    """Run the demo and print it; what it found is in the result."""
    return Demo(quick, console or make_console()).run()


__all__ = ["ADAPTERS", "Demo", "load_language_model", "make_console", "make_tower", "run_demo"]
