// A photo or a frame of a camera becomes the tensor that a network takes, as the toolboxes do it.

const LARGEST = 1280; // pixels of the longer side of what is kept of a photo
// How far a kernel reaches, in pixels, and its weight at a distance. OpenCV's cubic is sharper.
const KERNELS = {
  bilinear: () => [1, (x) => 1 - x],
  bicubic: (a) => [2, (x) =>
    (x < 1 ? ((a + 2) * x - a - 3) * x * x + 1 : (((x - 5) * x + 8) * x - 4) * a)],
};
const canvas = globalThis.OffscreenCanvas && new OffscreenCanvas(1, 1); // kept: phones have few

/** Give the RGBA pixels of a bitmap or a video, reduced to at most 1,280 pixels. */
export function readPixels(source, width, height) {
  const scale = Math.min(LARGEST / Math.max(width, height), 1);
  [canvas.width, canvas.height] = [width, height].map((side) => Math.round(side * scale));
  const context = canvas.getContext('2d', { willReadFrequently: true });
  context.imageSmoothingQuality = 'high';
  context.drawImage(source, 0, 0, canvas.width, canvas.height);
  return context.getImageData(0, 0, canvas.width, canvas.height);
}

/** Decode a photo, turned as its EXIF data say. */
export async function readPhoto(blob) {
  const options = { imageOrientation: 'from-image', colorSpaceConversion: 'none' };
  const bitmap = await createImageBitmap(blob, options).catch(() => createImageBitmap(blob))
    .catch(() => null);
  if (!bitmap) throw new Error(`${blob.name} cannot be decoded as an image by this browser`);
  const pixels = readPixels(bitmap, bitmap.width, bitmap.height);
  bitmap.close();
  return pixels;
}

/** Round halves to the even number, as Python does. */
function round(value) {
  const near = Math.round(value);
  return near - value === 0.5 && near % 2 ? near - 1 : near;
}

/** Resize the width of RGBA pixels as OpenCV or Pillow do, and turn them: twice resizes both. */
function resizeAndTurn({ data, width, height }, newWidth, { backend, interpolation }) {
  const smooths = backend === 'pillow'; // when it shrinks an image; OpenCV does not
  const [reach, weigh] = KERNELS[interpolation]?.(smooths ? -0.5 : -0.75) ?? [];
  if (!reach) throw new Error(`this page does not resize by ${interpolation} interpolation`);
  const [ratio, old] = [width / newWidth, new Float32Array(data)];
  const scale = smooths ? Math.max(ratio, 1) : 1;
  const made = new Float32Array(newWidth * height * 4);
  for (let column = 0; column < newWidth; column++) {
    const center = (column + 0.5) * ratio - 0.5;
    const taps = []; // places, and their weights
    for (let at = Math.floor(center - reach * scale) + 1; at < center + reach * scale; at++) {
      const inside = Math.min(Math.max(at, 0), width - 1);
      if (inside === at || !smooths) taps.push([inside, weigh(Math.abs(at - center) / scale)]);
    }
    const sum = taps.reduce((total, [, weight]) => total + weight, 0);
    for (const [place, weight] of taps) {
      const share = weight / sum;
      for (let row = 0; row < height; row++) {
        const from = (row * width + place) * 4;
        const to = (column * height + row) * 4;
        made[to] += share * old[from];
        made[to + 1] += share * old[from + 1];
        made[to + 2] += share * old[from + 2];
        made[to + 3] = 255;
      }
    }
  }
  const rounded = smooths ? new Uint8ClampedArray(made) : made; // Pillow rounds twice
  return { data: rounded, width: height, height: newWidth };
}

/** Cut rows and columns out of RGBA pixels. */
function cut({ data, width }, top, left, rows, columns) {
  const made = new Uint8ClampedArray(rows * columns * 4);
  for (let row = 0; row < rows; row++) {
    const start = ((top + row) * width + left) * 4;
    made.set(data.subarray(start, start + columns * 4), row * columns * 4);
  }
  return { data: made, width: columns, height: rows };
}

const sides = ({ shape, layout }) => (layout === 'NHWC' ? shape.slice(1, 3) : shape.slice(2));

/** Resize and crop an image for an input, and say where it is in it, as its description says. */
export function fit(image, input) {
  const [height, width] = sides(input);
  const { width: oldWidth, height: oldHeight } = image;
  const how = input.resize ?? { backend: 'cv2', interpolation: 'bilinear' };
  if (how.share) { // a square out of the middle
    const length = how.share * Math.min(oldWidth, oldHeight);
    const [top, left] = [oldHeight, oldWidth].map((side) => Math.max(round((side - length) / 2), 0));
    const square = cut(image, top, left, Math.trunc(top + length) - top, Math.trunc(left + length) - left);
    const data = resizeAndTurn(resizeAndTurn(square, width, how), height, how).data;
    return { data: new Uint8ClampedArray(data), width, height, top: 0, left: 0 };
  }
  const largest = Math.min(width / oldWidth, height / oldHeight, input.resize ? Infinity : 1);
  const size = [oldWidth, oldHeight].map((side) => how.shorter
    ? Math.max(Math.floor((side * how.shorter) / Math.min(oldWidth, oldHeight)), 1)
    : Math.max(Math.floor(side * largest + 0.5), 1));
  const turned = resizeAndTurn(image, size[0], how);
  const whole = new Uint8ClampedArray(resizeAndTurn(turned, size[1], how).data);
  const [rows, columns] = [size[1], size[0]].map((side, i) => Math.min(how.crop?.[i] ?? side, side));
  const [top, left] = [round((size[1] - rows) / 2), round((size[0] - columns) / 2)];
  const { data } = cut({ data: whole, width: size[0] }, top, left, rows, columns);
  const share = input.letterbox === 'center' ? 0.5 : 0; // of the padding
  const before = [height - rows, width - columns].map((padding) => Math.floor(padding * share));
  return { data, width: columns, height: rows, top: before[0], left: before[1] };
}

/** Make the tensor of an input: the image where it is in it, and padding. */
export function toTensor(image, input) {
  const { layout, kind, mean, std, channels, padding } = input;
  const bits = input.loader?.bits ?? 8;
  if (bits !== 8) throw new Error(`the network was trained on pictures of ${bits} bits`);
  if (!mean && kind !== 'image') throw new Error('the file does not name mean and std of images');
  const [height, width] = sides(input);
  const tensor = new Float32Array(height * width * 3);
  const [step, plane] = layout === 'NHWC' ? [3, 1] : [1, height * width];
  for (let c = 0; c < 3; c++) {
    const from = channels === 'BGR' ? 2 - c : c;
    const [shift, scale] = kind === 'image' ? [0, 1] : [mean[c], std[c]];
    for (let i = 0; i < height * width; i++) {
      const [row, column] = [Math.floor(i / width) - image.top, (i % width) - image.left];
      const inside = row >= 0 && row < image.height && column >= 0 && column < image.width;
      const pixel = image.data[(row * image.width + column) * 4 + from];
      tensor[i * step + c * plane] = inside ? (pixel - shift) / scale : (padding?.[c] ?? 0);
    }
  }
  return tensor;
}
