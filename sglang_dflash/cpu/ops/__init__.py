"""Pure-PyTorch twins of the native CPU ops that SGLang's `is_cpu()` path calls, one noun a file.

They run on any CPU and favour being plainly right over being fast; :mod:`sglang_dflash.cpu.stand_in`
publishes them under the names SGLang imports.
"""
