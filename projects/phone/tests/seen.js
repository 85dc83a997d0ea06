// Run in the page by test_phone.py: how it prepares the photo, and what it decodes from a tensor.
async ([number, tensor]) => {
  const { channelsFirst, decodeBoxes, labelMap } = await import('./decode.js');
  const { open } = await import('./engines.js');
  const { fit, readPhoto, toTensor } = await import('./prepare.js');
  const { shape, files } = await (await fetch('files.json')).json();
  const { name, input, outputs, about } = files[number];
  const photo = await readPhoto(document.getElementById('photo').files[0]);
  const small = fit(photo, input);
  const prepared = [...toTensor(small, input)];
  const bytes = new Uint8Array(await (await fetch(`files/${name}`)).arrayBuffer());
  const session = await open(files[number], bytes, 'wasm');
  const found = await session.run(Float32Array.from(tensor), input.shape);
  const maps = outputs.map((output, i) => [output.name, channelsFirst(found[i], output)]);
  const [, { values, shape: size }] = maps[0];
  const boxes = () => decodeBoxes(Object.fromEntries(maps), about.decode, small)
    .map(({ box, score, label }) => [...box, score, label]);
  const seen = about.decode ? boxes() : [...labelMap(values, size, ...shape)];
  const place = [small.top, small.left, small.height, small.width];
  return { place, prepared, seen };
}
