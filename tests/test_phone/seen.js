// Run in the page by test_page.py: how it prepares the photo, and what it decodes from a tensor.
async ([number, tensor, [height, width]]) => {
  const { channelsFirst, decodeBoxes, labelMap } = await import('./decode.js');
  const { open } = await import('./engines.js');
  const { fit, readPhoto, toTensor } = await import('./prepare.js');
  const { shape, files } = await (await fetch('files.json')).json();
  const { runtime, url, input, outputs, report } = files[number];
  const photo = await readPhoto(document.getElementById('photo').files[0]);
  const small = fit(photo, shape[1], shape[0]);
  const prepared = [...toTensor(small, input)];
  const bytes = new Uint8Array(await (await fetch(url)).arrayBuffer());
  const session = await open(runtime, bytes, 'wasm', outputs.map(({ name }) => name));
  const found = await session.run(Float32Array.from(tensor), input.shape);
  const maps = outputs.map((output, i) => [output.name, channelsFirst(found[i], output)]);
  const [, { values, shape: size }] = maps[0];
  const boxes = () => decodeBoxes(Object.fromEntries(maps), report.decode, [width, height])
    .map(({ box, score, label }) => [...box, score, label]);
  const seen = report.decode ? boxes() : [...labelMap(values, size, ...shape)];
  return { size: [small.height, small.width], prepared, seen };
}
