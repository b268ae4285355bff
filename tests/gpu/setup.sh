# Source this on the GPU host, from the repository root: unpacks SGLang and makes the plugin's entry points visible.
#   . tests/gpu/setup.sh BUNDLE_DIR
# BUNDLE_DIR holds sglang-site.tar.xz (SGLang 0.5.23 and what a bare CUDA image lacks) and, optionally,
# sglang-cache.tar.xz (compiled kernels of an earlier run).
SITE=/tmp/sglang-site
if [ ! -d "$SITE" ]; then
    mkdir -p "$SITE" && tar xJf "$1/sglang-site.tar.xz" -C "$SITE"
    [ -f "$1/sglang-cache.tar.xz" ] && tar xJf "$1/sglang-cache.tar.xz" -C "$HOME"
    info="$SITE/sglang_dflash-0.1.0.dist-info" && mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: sglang-dflash\nVersion: 0.1.0\n' > "$info/METADATA"
    cat > "$info/entry_points.txt" <<'EOF'
[sglang.srt.plugins]
sglang_dflash = sglang_dflash.plugin:register

[sglang.srt.platforms]
sglang_dflash_cpu = sglang_dflash.cpu.platform:activate
EOF
fi
export PYTHONPATH="$PWD:$SITE" HF_HUB_OFFLINE=1 SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
# The bundled Rust radix tree is built for a newer torch than this host has.
export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python
