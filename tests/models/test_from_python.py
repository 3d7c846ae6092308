"""`python:FILE.py:NAME`: the user's own code makes the model, and every way to get that wrong is told."""

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import dubito
from dubito.errors import CheckpointError, ModelError

X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
NET = """
import torch
from torch import nn

def make(hidden=5):
    torch.manual_seed(7)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, hidden), nn.ReLU(), nn.Linear(hidden, 3))
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a Python file into the folder that we are in; what it brings in is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), list(sys.path)
    monkeypatch.setattr("dubito.models.from_python._NEIGHBOURS", {})

    def written(code: str, name: str = "my_models.py") -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
        return file

    yield written
    assert sys.path == path
    for name in sys.modules.keys() - before:
        del sys.modules[name]


def error_of(name, **options):
    with pytest.raises(ModelError) as error:
        dubito.load(name, **options)
    return str(error.value)


def outputs(model):
    return model.logits(model.features(X))


def seeded(hidden=5):
    torch.manual_seed(7)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, hidden), nn.ReLU(), nn.Linear(hidden, 3))


@pytest.mark.parametrize("weights", ["pretrained", None])
def test_a_function_of_a_file(write, weights):
    file = write(NET)
    model = dubito.load("python:my_models.py:make", weights=weights, device="cpu")
    assert model.name == "python:my_models.py:make"
    assert not any(part.training for part in model.module.modules())
    assert torch.equal(outputs(model), seeded()(X))
    assert model.fingerprint()["weights"] == dubito.wrap(seeded()).fingerprint()["weights"]
    assert dubito.load(f"python:{file}:make").name == f"python:{file}:make"


def test_options_are_the_function_s_arguments(write):
    write(NET)
    assert dubito.load("python:my_models.py:make", hidden=9).features(X).shape == (2, 9)


def test_a_module_that_stands_in_a_file_is_new_each_time(write):
    write(NET + "\nnet = make()")
    first, second = dubito.load("python:my_models.py:net"), dubito.load("python:my_models.py:net")
    assert first.module is not second.module
    assert torch.equal(outputs(first), seeded()(X))


def test_a_file_that_was_just_changed_is_read_again(write):
    write(NET)
    assert dubito.load("python:my_models.py:make").features(X).shape == (2, 5)
    write(NET.replace("hidden=5", "hidden=6"))  # of the same length, within the same second
    assert dubito.load("python:my_models.py:make").features(X).shape == (2, 6)


def test_a_path_may_hold_colons(write):
    write(NET, "c:old/my_models.py")
    assert dubito.load("python:c:old/my_models.py:make").name == "python:c:old/my_models.py:make"


def test_a_module_by_its_dotted_name_is_left_as_it_was(write, tmp_path, monkeypatch):
    write(
        NET + "\nnet = make()\nwrapped = __import__('dubito').wrap(net, classes=['ant', 'bee', 'cat'])", "pack/nets.py"
    )
    other = {key: value + 1 for key, value in seeded().state_dict().items()}
    save_file(other, tmp_path / "w.safetensors")
    model = dubito.load("python:pack.nets:net", weights="w.safetensors")
    net = sys.modules["pack.nets"].net
    assert net.training
    assert torch.equal(net[3].weight, seeded()[3].weight)
    assert torch.equal(model.module[3].weight, seeded()[3].weight + 1)
    assert torch.equal(outputs(dubito.load("python:pack.nets:make")), seeded()(X))
    named = dubito.load("python:pack.nets:wrapped")
    assert (named.classes, sys.modules["pack.nets"].wrapped.name) == (["ant", "bee", "cat"], "Sequential")


def test_a_module_of_timm(write):
    write("import timm\ndef make(): return timm.create_model('test_resnet', num_classes=4)")
    model = dubito.load("python:my_models.py:make")
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(model.logits(model.features(x)), model.module(x), atol=1e-6)
    assert model.transform.describe() == {"kind": "none"}


WRAPPED = """
import dubito
from PIL import Image
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(48, 6), nn.Linear(6, 2)
    def forward(self, x):
        return self.fc(self.body(x.flatten(1)).relu()).softmax(-1)

def make():
    return dubito.wrap(
        Net(), transform=dubito.Preprocess(4), classes=CLASSES, head=HEAD, output="probabilities", name="mine"
    )
"""


def test_arguments_of_wrap_are_kept(write):
    write(WRAPPED.replace("CLASSES", "['ant', 'bee']").replace("HEAD", "'fc'"))
    model = dubito.load("python:my_models.py:make", device="cpu")
    assert (model.name, model.classes, model.output) == ("python:my_models.py:make", ["ant", "bee"], "probabilities")
    assert model.transform == dubito.Preprocess(4)
    assert model.fingerprint()["head"] == {"layer": "fc", "output": "probabilities"}
    image = model.transform.prepare(Image.new("RGB", (4, 4)))
    with torch.no_grad():
        x = model.transform.finish(image[None])
        assert torch.allclose(model.logits(model.features(x)).softmax(-1), model.module(x), atol=1e-6)


def test_a_number_of_classes_is_kept(write):
    write(WRAPPED.replace("CLASSES", "5").replace("HEAD", "None"))
    with pytest.raises(ModelError, match=r"python:my_models\.py:make: classes says 5, the module gives 2 outputs"):
        dubito.load("python:my_models.py:make").features(X)


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_weights_from_a_file(write, tmp_path, ending):
    write(NET)
    other = {key: value + 0.5 for key, value in seeded().state_dict().items()}
    path = tmp_path / f"w.{ending}"
    save_file(other, path) if ending == "safetensors" else torch.save({"state_dict": other}, path)
    expected = seeded()
    expected.load_state_dict(other)
    assert torch.equal(outputs(dubito.load("python:my_models.py:make", weights=path)), expected(X))
    with pytest.raises(CheckpointError, match=r"does not fit Sequential: .* of another shape: 1\.weight \(\(5, 48\)"):
        dubito.load("python:my_models.py:make", weights=str(path), hidden=6)
    with pytest.raises(CheckpointError, match=r"weights: no file 'gone\.safetensors'"):
        dubito.load("python:my_models.py:make", weights="gone.safetensors")


def test_the_weights_of_a_module_that_was_saved_whole(write, tmp_path):
    write(NET)
    torch.save(seeded(), tmp_path / "whole.pth")
    model = dubito.load("python:my_models.py:make", weights=tmp_path / "whole.pth")
    assert torch.equal(outputs(model), seeded()(X))


def test_another_device_gets_a_copy(write):
    write(NET)
    model = dubito.load("python:my_models.py:make", device="meta")
    assert model.device.type == "meta"


def test_neighbours_are_found_while_the_model_is_made_and_not_afterwards(write, tmp_path):
    write("WIDTH = 6", "nets/a_neighbour.py")
    write("DEPTH = 1", "nets/later/a_part.py")
    inner = "    from later.a_part import DEPTH\n    return nn.Linear(WIDTH, DEPTH)"
    write(f"from torch import nn\nfrom a_neighbour import WIDTH\ndef make():\n{inner}", "nets/my_models.py")
    assert dubito.load("python:nets/my_models.py:make").module.in_features == 6
    assert "my_models" not in sys.modules
    assert str(tmp_path / "nets") not in sys.path
    sys.modules.pop("a_neighbour")
    with pytest.raises(ModuleNotFoundError):
        __import__("a_neighbour")


def test_two_folders_with_neighbours_of_one_name(write):
    for folder, width in (("one", 4), ("two", 8)):
        write(f"WIDTH = {width}", f"{folder}/layers_of_mine/__init__.py")
        write("from torch import nn\nfrom layers_of_mine import WIDTH\nnet = nn.Linear(WIDTH, 2)", f"{folder}/m.py")
    loaded = [dubito.load(f"python:{folder}/m.py:net").module.in_features for folder in ("one", "two", "one", "two")]
    assert loaded == [4, 8, 4, 8]
    assert sys.modules["layers_of_mine"].WIDTH == 4  # what was imported before stays


def test_installed_packages_are_never_neighbours(write):
    file = write("import dubito\nfrom torch import nn\nnet = dubito.wrap(nn.Linear(2, 2))")
    sys.path.insert(0, str(file.parent))  # then its modules are importable for everybody
    try:
        write("", "a_common_one.py")
        write("import a_common_one\n" + file.read_text())
        dubito.load("python:my_models.py:net")
        here = sys.modules["a_common_one"]
        write("import a_common_one\nfrom torch import nn\nnet = nn.Linear(2, 2)\nnet.seen = a_common_one", "sub/m.py")
        assert dubito.load("python:sub/m.py:net").module.seen is here
    finally:
        sys.path.remove(str(file.parent))


@pytest.mark.parametrize(
    "name",
    [
        "my_models.py",
        "c:my_models.py",
        "my_models.py:make()",
        "./my_models:make",
        "make",
        "my_models.py:",
        ":make",
        "my-package.models:make",
    ],
)
def test_names_that_cannot_be_split(write, name):
    write(NET)
    message = error_of(f"python:{name}")
    assert message.startswith("load: a model of your own is named 'python:FILE.py:FUNCTION' or 'python:PACKAGE.MODULE:")
    assert f"got 'python:{name}'. Keep the ending .py of a file, and leave out parentheses" in message


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("my_models.py:make", "Did you mean 'python:my_models.py:make'?"),
        ("types.py", "Did you mean 'python:types.py:FUNCTION'?"),
        ("C:/nets/my_models.py:make", "Did you mean 'python:C:/nets/my_models.py:make'?"),
        ("pyton:my_models.py:make", "Did you mean 'python:my_models.py:make'?"),
    ],
)
def test_a_forgotten_source(name, hint):
    assert error_of(name).endswith(hint)


def test_a_file_that_is_not_there(write, tmp_path):
    write(NET)
    message = error_of("python:my_model.py:make")
    assert message == f"load: no file 'my_model.py' ({tmp_path / 'my_model.py'}). Nearest there: my_models.py."
    assert error_of("python:away/x.py:make").endswith("A relative path counts from the folder you are in.")


def test_a_module_that_is_not_there(write, tmp_path):
    write(NET, "pack/nets.py")
    message = error_of("python:pack.nots:make")
    assert message.startswith(f"load: no module 'pack.nots' is installed or in '{tmp_path}'. Go to the folder")
    assert error_of("python:pock.nets:make").startswith("load: no module 'pock' is installed")


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (NET, "Nearest: make."),
        ("import torch\ndef network(): ...\n", "Nearest: network."),
        ("x = 3", "Nearest: none; write a function that returns it."),
    ],
)
def test_a_function_that_is_not_there(write, code, hint):
    write(code)
    assert error_of("python:my_models.py:mak") == f"load: 'my_models.py' has no 'mak'. {hint}"


def test_a_class_or_a_number_is_no_model(write):
    write(WRAPPED + "\nsize = 3")
    assert error_of("python:my_models.py:Net") == (
        "load: 'Net' of 'my_models.py' must be an nn.Module or a function that makes one; got a class. Write "
        "`def make(): return ...` there, and pass that name."
    )
    assert error_of("python:my_models.py:size").startswith(
        "load: 'size' of 'my_models.py' must be an nn.Module or a function that makes one; got int."
    )


@pytest.mark.parametrize(
    ("code", "line", "kind"),
    [
        ("\nraise RuntimeError('boom')", 2, "RuntimeError: boom"),
        ("x = (\n", 1, "SyntaxError: '(' was never closed"),
        ("import sys\n\nsys.exit(4)", 3, "SystemExit: 4"),
        ("from a_neighbour import x", 1, "ModuleNotFoundError: No module named 'a_neighbour'"),
        ("\nimport json\njson.loads('{')", 3, "JSONDecodeError: Expecting property name"),  # not the line of json
    ],
)
def test_a_file_that_fails(write, code, line, kind):
    file = write(code)
    before = set(sys.modules)
    message = error_of("python:my_models.py:make")
    assert message.startswith(f"load: 'my_models.py' failed at {file}, line {line} ({kind}")
    assert message.endswith("). Fix it there; the whole traceback is this error's cause.")
    assert not [name for name in sys.modules.keys() - before if "my_models" in name]


def test_a_relative_import_without_a_package_is_reported(write):
    write("from .layers import x", "pack/nets.py")
    write("x = 1", "pack/layers.py")
    assert error_of("python:pack/nets.py:make").endswith(
        "A relative import needs a package: name the module instead, 'python:PACKAGE.MODULE:FUNCTION'."
    )
    write("from .layers import x\nfrom torch import nn\nnet = nn.Linear(x, 2)", "pack/nets.py")
    assert dubito.load("python:pack.nets:net").module.in_features == 1


def test_a_function_that_raises(write):
    neighbour = write("def deep():\n    raise KeyError('depth')", "a_neighbour.py")
    file = write(
        "import a_neighbour, dubito\nmake = lambda: a_neighbour.deep()\ndef wrong():\n  return dubito.load('tim:x')"
    )
    with pytest.raises(ModelError) as error:
        dubito.load("python:my_models.py:make")
    assert f"load: make() of 'my_models.py' failed at {neighbour}, line 2 (KeyError: 'depth')." in str(error.value)
    assert isinstance(error.value.__cause__, KeyError)
    assert f"failed at {file}, line 4 (ModelError: load: a model is named" in error_of("python:my_models.py:wrong")


@pytest.mark.parametrize(
    ("signature", "options", "message"),
    [
        ("depth, width", {}, "no arguments (missing a required argument: 'depth'). It takes depth, width: pass"),
        ("depth, width=3, **more", {"width": 2}, "width (missing a required argument: 'depth'). It takes depth, width"),
        ("depth, /", {"depth": 2}, "depth ("),
        ("depth=3", {"colour": 2}, "colour (got an unexpected keyword argument 'colour'). It takes depth: pass"),
    ],
)
def test_arguments(write, signature, options, message):
    write(f"def make({signature}): ...")
    assert error_of("python:my_models.py:make", **options).startswith(
        f"load: make() of 'my_models.py' cannot be called with {message}"
    )


def test_a_type_error_inside_the_function_is_not_one_of_its_arguments(write):
    file = write("def make():\n    return len(3)")
    assert f"failed at {file}, line 2 (TypeError: object of type 'int'" in error_of("python:my_models.py:make")


def test_a_module_that_stands_takes_no_options(write):
    write(NET + "\nnet = make()")
    assert error_of("python:my_models.py:net", hidden=3) == (
        "load: 'net' of 'my_models.py' is a module that is made already; got hidden as well. Leave options out, or "
        "name a function that takes them."
    )


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("None", "NoneType. End it with `return model`."),
        ("(net, 'words')", "tuple. Return the module alone; dubito.wrap(module, transform=..., classes=...) adds"),
        ("net.state_dict()", "OrderedDict. Return the module; weights=PATH loads tensors from a file."),
        ("nn.Linear", "the class Linear. Call the class"),
        ("3", "int. Return the module itself."),
        ("{}", "dict. Return the module; weights="),
    ],
)
def test_something_else_comes_back(write, result, message):
    write(f"from torch import nn\nnet = nn.Linear(2, 3)\ndef make(): return {result}")
    assert error_of("python:my_models.py:make").startswith(
        f"load: make() of 'my_models.py' must return an nn.Module, or what dubito.wrap makes of one; got {message}"
    )
