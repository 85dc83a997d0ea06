// A photo becomes the tensor that a network takes, as the toolboxes prepare it.

const EDGE = 0.875; // of the shorter side, which classifiers see

/** Decode a photo, turned as its EXIF data say. */
export async function readPhoto(blob) {
  const options = { imageOrientation: 'from-image', colorSpaceConversion: 'none' };
  const bitmap = await createImageBitmap(blob, options).catch(() => createImageBitmap(blob))
    .catch(() => null);
  if (!bitmap) throw new Error(`${blob.name} cannot be decoded as an image by this browser`);
  const { width, height } = bitmap;
  const context = new OffscreenCanvas(width, height).getContext('2d', { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  return context.getImageData(0, 0, width, height);
}

/** Round halves to the even number, as Python does. */
function round(value) {
  const near = Math.round(value);
  return near - value === 0.5 && near % 2 ? near - 1 : near;
}

/** Give for each new place the two old ones next to it, and the share of the second. */
function neighbours(from, to) {
  const [low, high, share] = [new Int32Array(to), new Int32Array(to), new Float32Array(to)];
  for (let i = 0; i < to; i++) {
    const place = Math.min(Math.max((i + 0.5) * (from / to) - 0.5, 0), from - 1);
    low[i] = Math.floor(place);
    high[i] = Math.min(low[i] + 1, from - 1);
    share[i] = place - low[i];
  }
  return { low, high, share };
}

/** Interpolate channels that lie behind one another as OpenCV's INTER_LINEAR: without smoothing. */
export function resize({ data, width, height }, newWidth, newHeight, channels = 4) {
  const [x, y] = [neighbours(width, newWidth), neighbours(height, newHeight)];
  const resized = new data.constructor(newWidth * newHeight * channels); // a clamped one rounds
  for (let row = 0, to = 0; row < newHeight; row++) {
    const [top, bottom] = [y.low[row] * width, y.high[row] * width];
    for (let column = 0; column < newWidth; column++) {
      const [left, right] = [x.low[column], x.high[column]];
      for (let c = 0; c < channels; c++, to++) {
        const [a, b] = [data[(top + left) * channels + c], data[(bottom + left) * channels + c]];
        const above = a + (data[(top + right) * channels + c] - a) * x.share[column];
        const below = b + (data[(bottom + right) * channels + c] - b) * x.share[column];
        resized[to] = above + (below - above) * y.share[row];
      }
    }
  }
  return { data: resized, width: newWidth, height: newHeight };
}

/** Resize an image to fit into a size, the ratio kept. */
export function fit(image, width, height) {
  const ratio = Math.min(width / image.width, height / image.height);
  return resize(image, round(image.width * ratio), round(image.height * ratio));
}

/** Cut the middle out of an image, whose shorter side is resized first. */
export function crop(image, width, height) {
  const edge = round(Math.max(width, height) / EDGE);
  const ratio = edge / Math.min(image.width, image.height);
  const size = [image.width, image.height].map((side) => Math.max(Math.floor(side * ratio), edge));
  const whole = resize(image, ...size);
  const [left, top] = [round((whole.width - width) / 2), round((whole.height - height) / 2)];
  const cut = new Uint8ClampedArray(width * height * 4);
  for (let row = 0; row < height; row++) {
    const start = ((top + row) * whole.width + left) * 4;
    cut.set(whole.data.subarray(start, start + width * 4), row * width * 4);
  }
  return { data: cut, width, height };
}

/** Make the tensor that a report's input asks for: an image at its top left, and padding. */
export function toTensor(image, { shape, layout, kind, mean, std, channels, padding }) {
  if (!mean && kind !== 'image') throw new Error('the report has no mean and std of images');
  const [height, width] = layout === 'NHWC' ? shape.slice(1, 3) : shape.slice(2);
  const tensor = new Float32Array(height * width * 3);
  const [step, plane] = layout === 'NHWC' ? [3, 1] : [1, height * width];
  for (let c = 0; c < 3; c++) {
    const from = channels === 'BGR' ? 2 - c : c;
    const [shift, scale] = kind === 'image' ? [0, 1] : [mean[c], std[c]];
    for (let row = 0; row < height; row++) {
      for (let column = 0; column < width; column++) {
        const inside = row < image.height && column < image.width;
        const pixel = image.data[(row * image.width + column) * 4 + from];
        const value = inside ? (pixel - shift) / scale : (padding?.[c] ?? 0);
        tensor[(row * width + column) * step + c * plane] = value;
      }
    }
  }
  return tensor;
}
