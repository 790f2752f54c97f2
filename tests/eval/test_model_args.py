"""The lines that people paste: d3LLM's scripts, and what is refused."""

import re

import pytest

from jdllm import errors
from jdllm.eval import model_args
from jdllm.options import sampling_params

MULTI = {"algorithm": "FullAttnMultiBlock", "block_length": 32, "threshold": 0.5}
# What d3LLM's README and scripts pass to `eval_llada.py` and to Dream's `diffllm`.
LINES = {
    "vanilla": (
        "model_path='GSAI-ML/LLaDA-8B-Instruct',gen_length=256,steps=256,block_length=32,"
        'show_speed=True,task="gsm8k_cot_zeroshot"',
        {"algorithm": "LLaDA", "steps": 256, "block_length": 32},
    ),
    "entropy threshold": (
        "model_path=M,gen_length=256,steps=256,block_length=32,show_speed=True,threshold=0.5",
        {"algorithm": "EntropyThreshold", "threshold": 0.5, "block_length": 32},
    ),
    "Fast-dLLM with the dual cache": (
        "model_path=M,steps=8,gen_length=256,block_length=32,remasking=low_confidence,threshold=0.9,"
        "save_dir=null,generation_method=Fast_dllm_v1,use_cache=True,dual_cache=True",
        {"algorithm": "FastDLLM", "threshold": 0.9, "block_length": 32, "cache_mode": "dual"},
    ),
    "multi-block": (
        "model_path=M,gen_length=256,steps=256,block_length=32,threshold=0.5,"
        "generation_method=generate_multi_block,block_add_threshold=0.1,decoded_token_threshold=0.95,"
        "block_length=32",
        MULTI
        | {"block_add_threshold": 0.1, "decoded_token_threshold": 0.95, "cache_mode": "exact"},
    ),
    "multi-block with a cache": (
        "model_path=M,gen_length=256,steps=256,block_length=32,threshold=0.5,early_stop=True,"
        "generation_method=generate_multi_block_kv_cache,cache_delay_iter=2,refresh_interval=3",
        MULTI
        | {"cache_mode": "delayed", "cache_delay_iter": 2, "refresh_interval": 3}
        | {"early_stop": True},
    ),
    "a cache that is never refreshed": (
        "model_path=M,gen_length=256,block_length=32,threshold=0.5,cache_delay_iter=1,"
        "generation_method=generate_multi_block_kv_cache",
        MULTI | {"cache_mode": "delayed", "cache_delay_iter": 1, "refresh_interval": 10_000},
    ),
    "Dream, multi-block without a cache": (
        "torch_compile=True,pretrained=M,trust_remote_code=True,max_new_tokens=256,"
        "diffusion_steps=256,dtype=bfloat16,temperature=0.1,alg=entropy_threshold,dParallel=False,"
        "threshold=0.5,generation_method=generation_multi_block,block_length=32,"
        "cache_delay_iter=10000",
        MULTI | {"cache_mode": "exact"},
    ),
    "Dream, steps": (
        "pretrained=M,max_new_tokens=256,diffusion_steps=256,temperature=0.1,alg=entropy",
        {"algorithm": "Dream", "steps": 256, "alg": "entropy"},
    ),
    "a length, for any model": ("model_path=M,gen_length=256,threshold=0.9", {"threshold": 0.9}),
    "our own names": (
        "model_path=M,max_new_tokens=256,algorithm=LowConfidence,threshold=0.9",
        {"algorithm": "LowConfidence", "threshold": 0.9},
    ),
    "the engine's own algorithm": (
        "model_path=M,max_new_tokens=256,threshold=0.9",
        {"threshold": 0.9},
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_means_what_its_script_means(name):
    line, dllm = LINES[name]
    found = model_args.parse(model_args.split(line))
    assert found.sampling["dllm"] == dllm
    assert found.sampling["max_new_tokens"] == 256
    assert found.engine["model_path"] in ("M", "GSAI-ML/LLaDA-8B-Instruct")
    assert found.show_speed == ("show_speed" in line)
    sampling_params.SamplingParams.from_mapping(found.sampling)


def test_other_names_go_where_they_belong():
    line = (
        "pretrained=M,max_length=2048,temperature=1e-1,seed=3,mc_num=64,is_check_greedy=False,"
        "batch_size=8,mask_id=126336,device=cuda"
    )
    found = model_args.parse(model_args.split(line))
    assert found.engine == {"model_path": "M", "context_length": 2048}
    assert found.sampling == {"temperature": 0.1, "seed": 3}
    assert found.likelihood == {"mc_num": 64, "is_check_greedy": False, "batch_size": 8}
    assert (found.mask_id, found.device) == (126336, "cuda")
    found = model_args.parse(model_args.split("base_url=http://h:1,num_concurrent=4,threshold=1"))
    assert found.server == {"base_url": "http://h:1"}
    assert (found.parallel, found.engine) == (4, {})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gen_lenght=256", "unknown name 'gen_lenght'; did you mean 'gen_length'?"),
        ("gen_length", "'gen_length' is not NAME=VALUE"),
        ("gen_length=256,max_new_tokens=128", "given twice"),
        ("generation_method=generate_multiblock", "did you mean 'generate_multi_block'"),
        ("save_dir=out", "use --output_path"),
        ("use_cache=True,generation_method=generate_multi_block", "Fast_dllm_v1"),
        ("use_cache=True", "needs generation_method"),
        ("num_concurrent=0", "num_concurrent=0"),
        ("is_check_greedy=no", "must be True or False"),
        ("base_url=http://h:1,model_path=M", "model_path is for evaluation in process"),
        ("x" * 500 + "=1", "unknown name"),
    ],
)
def test_what_is_refused(line, words):
    with pytest.raises(errors.ConfigError, match=re.escape(words)) as error:
        model_args.parse(model_args.split(line))
    assert len(str(error.value)) < 2000


def test_an_option_that_no_script_drops_is_refused_by_its_algorithm():
    found = model_args.parse(
        model_args.split("gen_length=8,generation_method=generate,alg_temp=0.5")
    )
    with pytest.raises(errors.RequestError, match="LLaDA has no option 'alg_temp'"):
        sampling_params.SamplingParams.from_mapping(found.sampling)
