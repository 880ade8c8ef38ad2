"""Presets, Hugging Face configs as the families write them, raw shapes, and everything that can be wrong with them."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fitune.errors import InputError, ShapeError
from fitune.models import PRESETS, ModelPreset, RouterSpec, parse_dtype, parse_shape, preset, read_model_config
from fitune.problem import DTYPES, LayerShape, local_experts_of_ep

# model: hidden, intermediate, experts, top-k, smallest and largest usual EP size, router
PUBLISHED = {
    "deepseek-v3": (7168, 2048, 256, 8, 8, 32, "sigmoid"),
    "deepseek-r1": (7168, 2048, 256, 8, 8, 32, "sigmoid"),
    "deepseek-v3.2": (7168, 2048, 256, 8, 8, 32, "sigmoid"),
    "kimi-k2": (7168, 2048, 384, 8, 16, 16, "sigmoid"),
    "deepseek-v4-flash": (4096, 2048, 256, 6, 4, 8, "sqrt_softplus"),
    "qwen3-30b-a3b": (2048, 768, 128, 8, 1, 4, "softmax"),
    "qwen3-235b-a22b": (4096, 1536, 128, 8, 8, 8, "softmax"),
    "qwen3-next-80b": (2048, 512, 512, 10, 2, 4, "softmax"),
    "qwen3-coder-480b": (6144, 2560, 160, 8, 8, 8, "softmax"),
    "glm-5": (6144, 2048, 256, 8, 8, 8, "sigmoid"),
    "minimax-m2.5": (3072, 1536, 256, 8, 4, 8, "sigmoid"),
    "mixtral-8x7b": (4096, 14336, 8, 2, 1, 2, "softmax"),
    "mixtral-8x22b": (6144, 16384, 8, 2, 1, 2, "softmax"),
    "llama4-maverick": (5120, 8192, 128, 1, 1, 8, "sigmoid"),
    "llama4-scout": (5120, 8192, 16, 1, 1, 8, "sigmoid"),
    "gpt-oss-120b": (2880, 2880, 128, 4, 1, 8, "softmax_topk"),
    "nemotron-3-nano": (2688, 1856, 128, 6, 2, 8, "sigmoid"),
    "nemotron-3-super": (4096, 2688, 512, 22, 2, 8, "sigmoid"),
    "gemma-4-26b-a4b": (2816, 704, 128, 8, 1, 1, "softmax"),
}


def test_presets_are_the_published_shapes() -> None:
    seen = {}
    for name, model in PRESETS.items():
        shape, ep = model.shape, model.usual_ep
        sizes = (shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k)
        seen[name] = (*sizes, ep[0], ep[-1], model.router.kind)
        assert model.name == name
        assert all(local_experts_of_ep(shape.num_experts, size) for size in ep)
    assert seen == PUBLISHED


def test_router_details() -> None:
    assert preset("deepseek-v3").router == RouterSpec("sigmoid", True, True, 8, 4, 2.5)
    assert preset("kimi-k2").router == RouterSpec("sigmoid", True, True, 1, 1, 2.827)
    assert preset("llama4-scout").router == RouterSpec("sigmoid", renormalize=False)
    assert preset("nemotron-3-super").router.scale == 5.0


def test_dtypes_have_their_names_and_fp8_is_short_for_the_published_one() -> None:
    assert [parse_dtype(name) for name in DTYPES] == list(DTYPES)
    assert parse_dtype("fp8") == "fp8_block128"
    for wrong in ("", "FP8", "fp8_", "int4"):
        with pytest.raises(ShapeError, match=r"use one of bf16, .*fp8 is short for fp8_block128"):
            parse_dtype(wrong)


def test_presets_take_a_dtype_and_forgive_spelling() -> None:
    assert preset("DeepSeek_V3", "fp16").shape == LayerShape(7168, 2048, 256, 8, "fp16")
    assert PRESETS["deepseek-v3"].shape.dtype == "bf16"
    with pytest.raises(TypeError):
        PRESETS["mine"] = PRESETS["glm-5"]  # type: ignore[index]


def test_an_unknown_model_gets_close_names_or_all() -> None:
    with pytest.raises(InputError, match=r"'deepsek-v3' is not known; did you mean deepseek-v3"):
        preset("deepsek-v3")
    with pytest.raises(InputError, match=r"known: deepseek-v3.*--shape"):
        preset("xyzzy")


@pytest.mark.parametrize(
    "router",
    [
        RouterSpec(num_groups=3),
        RouterSpec(num_groups=0),
        RouterSpec(num_groups=8, topk_groups=9),
        RouterSpec(num_groups=8, topk_groups=0),
        RouterSpec(num_groups=16, topk_groups=1),
        RouterSpec(scale=0.0),
        RouterSpec(scale=float("nan")),
        RouterSpec(scale=float("inf")),
    ],
)
def test_impossible_routers(router: RouterSpec) -> None:
    with pytest.raises(ShapeError, match="router"):
        router.check(64, 8)


# ---- config.json as each family writes it ----

FAMILIES: dict[str, tuple[dict[str, Any], tuple[int, int, int, int], RouterSpec]] = {
    "deepseek_v3": (
        {
            "model_type": "deepseek_v3",
            "hidden_act": "silu",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        (7168, 2048, 256, 8),
        RouterSpec("sigmoid", True, True, 8, 4, 2.5),
    ),
    "deepseek_v2": (
        {
            "model_type": "deepseek_v2",
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "n_group": 8,
            "topk_group": 3,
            "norm_topk_prob": False,
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 16.0,
            "scoring_func": "softmax",
            "topk_method": "group_limited_greedy",
        },
        (5120, 1536, 160, 6),
        RouterSpec("softmax", False, False, 8, 3, 16.0),
    ),
    "kimi nested": (
        {
            "model_type": "kimi_k25",
            "text_config": {
                "model_type": "kimi_k2",
                "hidden_size": 7168,
                "moe_intermediate_size": 2048,
                "n_routed_experts": 384,
                "num_experts_per_tok": 8,
                "n_group": 1,
                "topk_group": 1,
                "norm_topk_prob": True,
                "routed_scaling_factor": 2.827,
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
            },
            "vision_config": {"hidden_size": 1152},
        },
        (7168, 2048, 384, 8),
        RouterSpec("sigmoid", True, True, 1, 1, 2.827),
    ),
    "deepseek_v4": (
        {
            "model_type": "deepseek_v4",
            "hidden_size": 4096,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 1.5,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
        },
        (4096, 2048, 256, 6),
        RouterSpec("sqrt_softplus", True, True, scale=1.5),
    ),
    "qwen3_moe": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
        (2048, 768, 128, 8),
        RouterSpec(),
    ),
    "qwen3 omni, nested twice": (
        {
            "thinker_config": {
                "audio_config": {},
                "text_config": {
                    "model_type": "qwen3_omni_moe_text",
                    "hidden_size": 2048,
                    "moe_intermediate_size": 768,
                    "num_experts": 128,
                    "num_experts_per_tok": 8,
                    "norm_topk_prob": True,
                },
            }
        },
        (2048, 768, 128, 8),
        RouterSpec(),
    ),
    "mixtral": (
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        (4096, 14336, 8, 2),
        RouterSpec(),
    ),
    "gpt_oss": (
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "experts_per_token": 4,
        },
        (2880, 2880, 128, 4),
        RouterSpec("softmax_topk"),
    ),
    "llama4": (
        {
            "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text",
                "hidden_size": 5120,
                "intermediate_size": 8192,
                "intermediate_size_mlp": 16384,
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
            },
        },
        (5120, 8192, 16, 1),
        RouterSpec("sigmoid", renormalize=False),
    ),
    "glm": (
        {
            "model_type": "glm4_moe",
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        (4096, 1408, 128, 8),
        RouterSpec("sigmoid", bias=True),
    ),
    "minimax": (
        {
            "model_type": "minimax_m2",
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
        (3072, 1536, 256, 8),
        RouterSpec("sigmoid", bias=True),
    ),
    "nemotron": (
        {
            "model_type": "nemotron_h",
            "hidden_size": 2688,
            "intermediate_size": 1856,
            "moe_intermediate_size": 1856,
            "mlp_hidden_act": "relu2",
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        (2688, 1856, 128, 6),
        RouterSpec("sigmoid", bias=True, scale=2.5),
    ),
    "gemma": (
        {
            "model_type": "gemma4",
            "text_config": {
                "model_type": "gemma4_text",
                "hidden_size": 2816,
                "intermediate_size": 2112,
                "moe_intermediate_size": 704,
                "hidden_activation": "gelu_pytorch_tanh",
                "num_experts": 128,
                "top_k_experts": 8,
            },
        },
        (2816, 704, 128, 8),
        RouterSpec(),
    ),
    "olmoe": (
        {
            "model_type": "olmoe",
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        (2048, 1024, 64, 8),
        RouterSpec(renormalize=False),
    ),
}

MIXTRAL = FAMILIES["mixtral"][0]
DEEPSEEK = FAMILIES["deepseek_v3"][0]


def read(folder: Path, config: object) -> ModelPreset:
    file = folder / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return read_model_config(file, "bf16")


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_of_the_families(tmp_path: Path, family: str) -> None:
    config, sizes, router = FAMILIES[family]
    model = read(tmp_path, config)
    assert model.shape == LayerShape(*sizes)
    assert model.router == router


def test_presets_agree_with_the_config_files_of_the_same_model(tmp_path: Path) -> None:
    for family, name in (("deepseek_v3", "deepseek-v3"), ("gpt_oss", "gpt-oss-120b"), ("nemotron", "nemotron-3-nano")):
        model = read(tmp_path, FAMILIES[family][0])
        assert (model.shape, model.router) == (PRESETS[name].shape, PRESETS[name].router)


def test_a_folder_a_byte_order_mark_and_a_dtype_are_fine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL), encoding="utf-8-sig")
    assert read_model_config(str(tmp_path), "fp32").shape == LayerShape(4096, 14336, 8, 2, "fp32")


def test_what_is_not_modelled_is_said(tmp_path: Path) -> None:
    assert "relu2" in read(tmp_path, FAMILIES["nemotron"][0]).note
    assert "twice as wide" in read(tmp_path, FAMILIES["nemotron"][0]).note
    assert "gelu" in read(tmp_path, FAMILIES["gemma"][0]).note
    assert read(tmp_path, DEEPSEEK).note == ""
    latent = read(tmp_path, {**FAMILIES["nemotron"][0], "moe_latent_size": 1024})
    assert latent.shape.hidden_size == 1024
    assert "latent of 1024" in latent.note


def test_a_size_given_per_layer_counts_where_all_layers_agree(tmp_path: Path) -> None:
    config = {**DEEPSEEK, "moe_intermediate_size": [2048, 2048]}
    assert read(tmp_path, config).shape.intermediate_size == 2048
    with pytest.raises(InputError, match="moe_intermediate_size differs by layer"):
        read(tmp_path, {**DEEPSEEK, "moe_intermediate_size": [2048, 1024]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": None}, "no hidden size"),
        ({"num_experts_per_tok": None}, "no experts per token"),
        ({"moe_intermediate_size": None}, "no width of one expert"),
        ({"n_routed_experts": None}, "no mixture-of-experts"),
        ({"hidden_size": "7168"}, "hidden_size is '7168'"),
        ({"hidden_size": 7168.0}, "hidden_size is 7168.0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 10**40}, "hidden_size is 1000000"),
        ({"hidden_size": [[7168]]}, "hidden_size is"),
        ({"hidden_size": []}, "hidden_size is"),
        ({"n_routed_experts": -256}, "n_routed_experts is -256"),
        ({"n_routed_experts": {"a": 1}}, "n_routed_experts is"),
        ({"num_experts_per_tok": 257}, "top_k 257 is larger than num_experts 256"),
        ({"num_experts": 255}, "n_routed_experts is 256 but num_experts is 255"),
        ({"n_group": 7}, "do not split into 7 groups"),
        ({"topk_group": 9}, "topk_groups 9"),
        ({"n_group": "8"}, "n_group is '8'"),
        ({"scoring_func": "entmax"}, "scoring_func is 'entmax'"),
        ({"routed_scaling_factor": "big"}, "routed_scaling_factor is 'big'"),
        ({"routed_scaling_factor": -1}, "scale is -1"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
        ({"model_type": 3}, "model_type is 3"),
        ({"hidden_act": 3}, "hidden_act is 3"),
        ({"moe_latent_size": -1}, "moe_latent_size is -1"),
    ],
)
def test_broken_fields_are_named_with_file_and_value(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, {**DEEPSEEK, **change})
    text = str(caught.value)
    assert said in text
    assert str(tmp_path / "config.json") in text
    assert "\n" not in text
    assert len(text) < 400


def test_a_dense_width_is_never_taken_for_an_experts(tmp_path: Path) -> None:
    config = {name: value for name, value in FAMILIES["qwen3_moe"][0].items() if name != "moe_intermediate_size"}
    with pytest.raises(InputError, match="no width of one expert"):
        read(tmp_path, config)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]", b"null", b"\xff\xfe\x00{", b"[" * 100_000, b'"text"', b"{'a': 1}"]
)
def test_files_that_are_no_json_object(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json"):
        read_model_config(file, "bf16")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path, "a\0b"):
        with pytest.raises(InputError):
            read_model_config(path, "bf16")
    (tmp_path / "config.json").write_bytes(b" " * ((16 << 20) + 1))
    with pytest.raises(InputError, match="larger than"):
        read_model_config(tmp_path, "bf16")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(DEEPSEEK)), inner, max_size=4),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.sampled_from([*sorted(DEEPSEEK), "text_config", "num_experts"]), JUNK, max_size=6))
def test_no_config_does_worse_than_an_input_error(tmp_path: Path, change: dict[str, Any]) -> None:
    with suppress(InputError):
        assert isinstance(read(tmp_path, {**DEEPSEEK, **change}), ModelPreset)


# ---- raw shapes ----


def test_shapes_in_any_order_and_case() -> None:
    expected = LayerShape(7168, 2048, 256, 8)
    assert parse_shape("H=7168,I=2048,E=256,K=8", "bf16") == expected
    assert parse_shape(" k = 8, e=256 ,I=2048,h=7168 ", "bf16") == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not one of H="),
        ("7168x2048", "is not one of H="),
        ("H=7168,I=2048,E=256", "K is missing"),
        ("H=7168", "I, E, K is missing"),
        ("H=7168,I=2048,E=256,K=8,K=8", "K stands there twice"),
        ("H=7168,I=2048,E=256,K=8,X=1", "'X=1' is not one of"),
        ("H=7168,I=2048,E=256,K=eight", "'eight' is not a whole number"),
        ("H=7168,I=2048,E=256,K=-8", "'-8' is not a whole number"),
        ("H=7168,I=2048,E=256,K=", "'' is not a whole number"),
        ("H=7168,I=2048,E=256,K=٨", "is not a whole number"),
        ("H=99999999999,I=2048,E=256,K=8", "is not a whole number"),
        ("H=0,I=2048,E=256,K=8", "hidden_size is 0"),
        ("H=7168,I=2048,E=8,K=9", "top_k 9 is larger"),
    ],
)
def test_broken_shapes(text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_shape(text, "bf16")
    assert said in str(caught.value)
