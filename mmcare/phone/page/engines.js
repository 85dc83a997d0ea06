// The runtimes behind one interface: LiteRT.js for .tflite files, onnxruntime-web for .onnx files.
// A backend is what computes: 'wasm', 'threads', 'webgpu' or 'webnn'.

const threads = globalThis.navigator?.hardwareConcurrency ?? 1;
const suspends = 'Suspending' in WebAssembly; // lets a network run partly on the GPU
const here = (path) => new URL(path, import.meta.url).href;
const accelerated = (backend) => backend.startsWith('web');
const started = new Map(); // a runtime keeps its first settings, so each backend has its own

const RUNTIMES = {
  litert: {
    async start(backend) {
      const library = await import(`${here('@litertjs/core/dist/index.js')}?${backend}`);
      await library.loadLiteRt(here('@litertjs/core/wasm/'), {
        threads: backend === 'threads',
        jspi: suspends && accelerated(backend),
      });
      return library;
    },
    async open(library, bytes, backend, names) {
      const model = await library.loadAndCompile(bytes, {
        accelerator: accelerated(backend) ? backend : 'wasm',
        gpuOptions: { precision: 'fp32' },
        webNNOptions: { precision: 'fp32' },
      });
      if (accelerated(backend) && model.options.accelerator === 'wasm') {
        model.delete();
        throw new Error(`${backend} does not take all of it, and this browser cannot split it`);
      }
      const partly = accelerated(backend) && !model.isFullyAccelerated;
      const complaints = heard.filter((line) => /not supported|unsupported/i.test(line));
      const order = ordered(model.getOutputDetails().map(({ name }) => name), names);
      return {
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
      const build = backend !== 'webgpu' ? 'wasm' : suspends ? 'jspi' : 'webgpu';
      const file = here(`onnxruntime-web/dist/ort.${build}.min.mjs`);
      const library = await import(`${file}?${backend}`);
      library.env.wasm.wasmPaths = here('onnxruntime-web/dist/');
      library.env.wasm.numThreads = backend === 'threads' ? threads : 1;
      return library;
    },
    async open(library, bytes, backend, names) {
      if (backend === 'webnn') throw new Error('WebNN is for .tflite files here');
      const create = (logSeverityLevel) => {
        const executionProviders = [backend === 'webgpu' ? 'webgpu' : 'wasm'];
        return library.InferenceSession.create(bytes, { executionProviders, logSeverityLevel });
      };
      const session = await create(2);
      let left = [];
      if (heard.some((line) => line.includes('not assigned to the preferred'))) {
        const wordy = await create(0); // only its log says where nodes run
        left = nodesOnCpu(heard);
        await wordy.release();
      }
      const order = ordered(session.outputNames, names);
      return {
        note: left.length ? `on the CPU: ${left.join(', ')}` : '',
        async run(data, shape) {
          const input = new library.Tensor('float32', data, shape);
          const outputs = await session.run({ [session.inputNames[0]]: input });
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

/** Give the places of outputs: by the report's names, or by the numbers in LiteRT's own. */
export function ordered(found, names) {
  if (names.every((name) => found.includes(name))) return names.map((name) => found.indexOf(name));
  const number = (index) => Number(found[index].match(/\d+$/)?.[0] ?? index);
  return found.map((_, index) => index).sort((a, b) => number(a) - number(b));
}

/** List all backends, each with its label, and why it is missing if it is. */
export async function findBackends() {
  const { gpu, ml } = navigator;
  const insecure = isSecureContext ? '' : 'needs HTTPS or a tunnel';
  const shared = crossOriginIsolated ? '' : insecure || 'the host sends no headers of isolation';
  const adapter = gpu && (await gpu.requestAdapter().catch(() => null));
  const absent = insecure || 'not in this browser';
  return [
    { name: 'wasm', label: 'WebAssembly, 1 thread', missing: '' },
    { name: 'threads', label: `WebAssembly, ${threads} threads`, missing: shared },
    { name: 'webgpu', label: 'WebGPU', missing: adapter ? '' : absent },
    { name: 'webnn', label: 'WebNN, .tflite only', missing: ml ? '' : absent },
  ];
}

/**
 * Open a file: run(data, shape) maps a Float32Array to arrays of the named outputs, note says what
 * was left to the CPU, close() frees the memory.
 */
export async function open({ runtime, outputs }, bytes, backend) {
  const key = `${runtime}-${backend}`;
  const { start, open: openFile } = RUNTIMES[runtime];
  if (!started.has(key)) {
    started.set(key, start(backend));
    started.get(key).catch(() => started.delete(key)); // so that it can be tried again
  }
  const library = await started.get(key);
  heard = [];
  try {
    return await openFile(library, bytes, backend, outputs.map(({ name }) => name));
  } finally {
    heard = null;
  }
}
