// The runtimes behind one interface: LiteRT.js for .tflite files, onnxruntime-web for .onnx files.
// A backend is what computes: 'wasm', 'threads', 'webgpu' or 'webgpu-float16'.

const threads = globalThis.navigator?.hardwareConcurrency ?? 1;
const suspends = 'Suspending' in WebAssembly; // lets a network run partly on the GPU
const onGpu = (backend) => backend.startsWith('webgpu');
const here = (path) => new URL(path, import.meta.url).href;
// A runtime keeps its first settings, so each backend has its own.
const importLiteRt = (backend) => import(`${here('@litertjs/core/dist/index.js')}?${backend}`);
const started = new Map();

/** Load from where the page is, and once: the browser keeps it on its disk, if it has a cache. */
export async function load(...names) {
  const path = names.map(encodeURIComponent).join('/');
  const cache = await globalThis.caches?.open('mmcare').catch(() => null);
  const kept = await cache?.match(path).catch(() => null);
  const answer = kept ?? (await fetch(path).catch(() => null));
  if (!answer?.ok) throw new Error(`${names.at(-1)} cannot be loaded: is serve.py running?`);
  if (!kept) await cache?.put(path, answer.clone()).catch(() => null); // a full disk is no error
  return answer.arrayBuffer();
}

const RUNTIMES = {
  litert: {
    async start(backend) {
      const library = await importLiteRt(backend);
      await library.loadLiteRt(here('@litertjs/core/wasm/'), {
        threads: backend === 'threads',
        jspi: suspends && onGpu(backend),
      });
      return library;
    },
    async open(library, bytes, backend, names) {
      const model = await library.loadAndCompile(bytes, {
        accelerator: onGpu(backend) ? 'webgpu' : 'wasm',
        gpuOptions: { precision: backend === 'webgpu' ? 'fp32' : 'fp16' },
      });
      if (onGpu(backend) && model.options.accelerator === 'wasm') {
        model.delete();
        throw new Error(`WebGPU does not take all of it, and this browser cannot split it`);
      }
      const partly = onGpu(backend) && !model.isFullyAccelerated;
      const complaints = heard.filter((line) => /not supported|unsupported/i.test(line));
      const order = ordered(model.getOutputDetails().map(({ name }) => name), names, /\d+$/);
      const relaxed = await library.supportsFeature('relaxedSimd');
      const { numThreads } = model.options.cpuOptions;
      return {
        build: `${relaxed ? '' : 'no '}relaxed SIMD, threads: ${numThreads}`,
        note: partly ? `partly on the CPU: ${complaints.slice(0, 3).join(', ') || 'unnamed'}` : '',
        async run(data, shape) {
          const input = new library.Tensor(data, shape);
          const outputs = await model.run(input);
          const values = await Promise.all(outputs.map((output) => output.data()));
          for (const tensor of [input, ...outputs]) tensor.delete();
          return order.map((index) => values[index]);
        },
        close: () => model.delete(),
      };
    },
  },
  onnxruntime: {
    async start(backend) {
      if (backend === 'webgpu-float16') throw new Error('float16 is for LiteRT.js');
      const build = backend !== 'webgpu' ? 'wasm' : suspends ? 'jspi' : 'webgpu';
      const file = here(`onnxruntime-web/dist/ort.${build}.min.mjs`);
      const library = await import(`${file}?${backend}`);
      library.env.wasm.wasmPaths = here('onnxruntime-web/dist/');
      library.env.wasm.numThreads = backend === 'threads' ? threads : 1;
      const names = ['onnxruntime-web', 'dist', 'ort-wasm-simd-threaded.wasm']; // also for threads
      if (build === 'wasm') library.env.wasm.wasmBinary = await load(...names);
      return library;
    },
    async open(library, bytes, backend, names) {
      const session = await library.InferenceSession.create(bytes, {
        executionProviders: [backend === 'webgpu' ? 'webgpu' : 'wasm'],
        logSeverityLevel: backend === 'webgpu' ? 0 : 2, // only a long log says where nodes run
      });
      delete library.env.wasm.wasmBinary; // it runs, and phones are short of memory
      const left = nodesOnCpu(heard);
      const order = ordered(session.outputNames, names);
      const [image] = session.inputNames;
      return {
        build: `threads: ${library.env.wasm.numThreads}`,
        note: left.length ? `on the CPU: ${left.join(', ')}` : '',
        async run(data, shape) {
          const type = data instanceof Uint8Array ? 'uint8' : 'float32';
          const input = new library.Tensor(type, data, shape);
          const outputs = await session.run({ [image]: input }, { logSeverityLevel: 2 });
          return order.map((index) => outputs[session.outputNames[index]].data);
        },
        close: () => session.release(),
      };
    },
  },
};

// Runtimes name what they leave to the CPU in the console only, and bind its functions once.
let heard = null;
for (const kind of ['debug', 'log', 'info', 'warn', 'error']) {
  const original = console[kind].bind(console);
  console[kind] = (...words) => (heard ? heard.push(words.join(' ')) : original(...words));
}

/** Name the kinds of nodes that ONNX Runtime's log places on the CPU. */
export function nodesOnCpu(lines) {
  const kinds = new Set();
  let onCpu = false;
  for (const line of lines) {
    if (line.includes('placed on [')) onCpu = line.includes('[CPUExecutionProvider]');
    else if (onCpu && line.includes('VerifyEachNode')) kinds.add(line.match(/\] +(\w+) \(/)?.[1]);
  }
  return [...kinds].filter(Boolean);
}

/** Give the places of outputs by their names, or by the numbers in LiteRT's own, or as they are. */
export function ordered(found, names, numbers = /^$/) {
  if (names.every((name) => found.includes(name))) return names.map((name) => found.indexOf(name));
  const number = (index) => Number(found[index].match(numbers)?.[0] ?? index);
  return found.map((_, index) => index).sort((a, b) => number(a) - number(b));
}

/** List backends, each with its label, and why it is missing if it is. */
export async function findBackends(runtimes) {
  const insecure = isSecureContext ? '' : 'needs HTTPS or a tunnel';
  const alone = crossOriginIsolated ? '' : insecure || 'the host sends no headers of isolation';
  const litert = runtimes.includes('litert') && (await importLiteRt('wasm'));
  const relaxed = !litert || (await litert.supportsFeature('relaxedSimd'));
  const able = relaxed ? '' : 'LiteRT.js needs relaxed SIMD for them';
  const adapter = await navigator.gpu?.requestAdapter().catch(() => null);
  const absent = adapter ? '' : insecure || 'not in this browser';
  const half = litert ? 'the browser does not have it for this GPU' : 'for .tflite files';
  const able16 = litert && adapter?.features.has('shader-f16');
  return [
    { name: 'wasm', label: 'WebAssembly, 1 thread', missing: '' },
    { name: 'threads', label: `WebAssembly, ${threads} threads`, missing: alone || able },
    { name: 'webgpu', label: 'WebGPU', missing: absent },
    { name: 'webgpu-float16', label: 'WebGPU, float16', missing: absent || (able16 ? '' : half) },
  ];
}

/** Open a file: run(data, shape) maps a Float32Array to arrays of its outputs. */
export async function open({ runtime, outputs, about }, bytes, backend) {
  const key = `${runtime}-${backend}`;
  const { start, open: openFile } = RUNTIMES[runtime];
  if (!started.has(key)) {
    started.set(key, start(backend));
    started.get(key).catch(() => started.delete(key)); // so that it can be tried again
  }
  const library = await started.get(key);
  heard = [];
  try {
    const file = await openFile(library, bytes, backend, outputs.map(({ name }) => name));
    if (about.inputs?.[0].dtype !== 'uint8') return file;
    const rounded = (data) => new Uint8Array(Uint8ClampedArray.from(data).buffer);
    return { ...file, run: (data, shape) => file.run(rounded(data), shape) };
  } finally {
    heard = null;
  }
}
